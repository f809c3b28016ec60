"""Filtering rows: each filter on its own and together, every dropped row with its reasons."""

import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stillroom.curate.filter.contamination import ContaminationIndex, CountedPrompt
from stillroom.curate.filter.evaluation_prompts import evaluation_prompts
from stillroom.curate.filter.request import (
    DroppedRow,
    FilterDataset,
    FilterResult,
)
from stillroom.curate.filter.rows import Row, read_filter_rows
from stillroom.curate.filter.rules import Knowledge, asked_text, success_of
from stillroom.curate.filter.sets import Reasons, judged
from stillroom.curate.filter.tally import Tally
from stillroom.curate.filter.verdicts import Verdict, read_verdicts
from stillroom.curate.rows.read import check_output
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.row_files import rollout_files
from stillroom.files import LineWriter, atomic_output
from stillroom.lineage import FileRecord, Recording, record_written, write_manifest
from stillroom.settings import Workspace

_Read = Callable[[], Iterator[Row]]


def filter_dataset(
    workspace: Workspace, request: FilterDataset, *, tokenizer: Any = None
) -> FilterResult:
    """Writes the rows that pass, untouched, and the others' reasons; returns the counts.

    `tokenizer` is the student's; what `request.model` asks for needs it.
    """
    filtering = Filtering(workspace, request)
    read = functools.partial(read_filter_rows, filtering.source)
    renderer = ChatRenderer(tokenizer) if tokenizer is not None else None
    with Recording([*rollout_files(filtering.source), *filtering.other_files]) as recording:
        known = _knowledge(workspace, request, read, renderer)
        tally = Tally(request)
        with filtering.writing() as (kept, dropped):
            for row, reasons in judged(read, request, known):
                tally.add(row, reasons, renderer)
                if reasons:
                    dropped.write(dropped_row(row, reasons))
                else:
                    line = row.line.line
                    kept.write_raw(line.view, source=line.source)
        filtering.record(kept, dropped, tally, recording.records())
    return filtering.result(tally, known)


class Filtering:
    """What is filtered and where it goes; how that is done is left to others.

    Raises InputError where an output must not be written.
    """

    def __init__(self, workspace: Workspace, request: FilterDataset) -> None:
        self._workspace, self._request = workspace, request
        self.source = workspace.existing(request.input, what="input")
        self.output = workspace.output_file(request.output, what="output")
        self.dropped_file = self.output.with_name(self.output.name + ".dropped")
        names = [*request.decontaminate, *([request.verdicts] if request.verdicts else [])]
        others = [workspace.existing(name, what="file") for name in names]
        for path in (self.output, self.dropped_file):
            check_output(path, [self.source, *others])
        self.other_files = [file for path in others for file in rollout_files(path)]
        """What is read beside the input."""

    @contextmanager
    def writing(self) -> Generator[tuple[LineWriter, LineWriter]]:
        """Gives the writers of the rows that are kept and of what is told of the others."""
        with atomic_output(self.output) as kept, atomic_output(self.dropped_file) as dropped:
            yield kept, dropped

    def record(
        self,
        kept: LineWriter,
        dropped: LineWriter,
        tally: Tally,
        inputs: Sequence[FileRecord | Path],
    ) -> None:
        """Writes the manifest of the closed outputs."""
        write_manifest(
            self.output,
            written=kept,
            operation="filter_dataset",
            inputs=inputs,
            request=self._request.model_dump(mode="json"),
            counts={"read": tally.read, "kept": tally.kept},
            side=[record_written(self.dropped_file, dropped)],
        )

    def result(self, tally: Tally, known: Knowledge) -> FilterResult:
        """Returns what filtering came to."""
        return tally.result(self._workspace, self.output, self.dropped_file, set(known.verdicts))


class Survey:
    """What the rows say together: each task's outcomes, and which words their prompts share."""

    def __init__(self, request: FilterDataset, index: ContaminationIndex | None) -> None:
        self.is_needed = index is not None or request.min_success_rate is not None
        self._index = index
        self._known: Counter[str] = Counter()
        self._succeeded: Counter[str] = Counter()
        self.prompts: list[CountedPrompt] | None = None
        """Kept where it is a list."""

    def add(self, row: Row) -> None:
        """Takes in a row."""
        if row.facts is None:
            return
        if self._index is not None:
            counted = self._index.count_prompt(asked_text(row))
            if counted is not None and self.prompts is not None:
                self.prompts.append(counted)
        # What infrastructure ended says nothing about its task.
        if row.facts.error is None and (success := success_of(row.facts)) is not None:
            self._known[row.task] += 1
            self._succeeded[row.task] += success

    def take(self, other: "Survey") -> None:
        """Takes in what another survey says of other rows."""
        self._known.update(other._known)
        self._succeeded.update(other._succeeded)
        for counted in other.prompts or ():
            if self._index is not None:
                self._index.take(counted)

    def forget_index(self) -> None:
        """Lets go of the evaluation prompts: what is told of these rows goes on without them."""
        self._index = None

    def success_rates(self) -> dict[str, float]:
        """Returns the share of success of each task."""
        return {task: self._succeeded[task] / count for task, count in self._known.items()}


def evaluation_index(workspace: Workspace, request: FilterDataset) -> ContaminationIndex | None:
    """Returns the index of the evaluation prompts, before any row was counted."""
    paths = [workspace.existing(name, what="file") for name in request.decontaminate]
    prompts = [prompt for path in paths for prompt in evaluation_prompts(path)]
    return ContaminationIndex(prompts) if prompts else None


def given_verdicts(workspace: Workspace, request: FilterDataset) -> dict[str, Verdict]:
    """Returns the verdicts of the review that was given."""
    if request.verdicts is None:
        return {}
    return read_verdicts(workspace.existing(request.verdicts, what="verdicts"))


def _knowledge(
    workspace: Workspace, request: FilterDataset, read: _Read, renderer: ChatRenderer | None
) -> Knowledge:
    """Returns what the filters need to know; for some of them the rows are read once before."""
    verdicts = given_verdicts(workspace, request)
    index = evaluation_index(workspace, request)
    survey = Survey(request, index)
    if survey.is_needed:
        for row in read():
            survey.add(row)
    if index is not None:
        index.close()
    return Knowledge(renderer, survey.success_rates(), index, verdicts)


def dropped_row(row: Row, reasons: Reasons) -> DroppedRow:
    """Returns the line of the side file."""
    texts: list[str] = []
    like = None
    for reason in reasons:
        texts.append(reason.text)
        like = like or reason.like
    line = row.line
    return DroppedRow(str(line.path), line.line.number, row.id, texts, like)

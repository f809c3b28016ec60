"""Filtering rows: each filter on its own and together, every dropped row with its reasons."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stillroom.curate.contamination import ContaminationIndex
from stillroom.curate.convert import MAX_EXAMPLES
from stillroom.curate.distributions import Histogram
from stillroom.curate.evaluation_prompts import evaluation_prompts
from stillroom.curate.filter_request import (
    Distributions,
    DroppedRow,
    FilterDataset,
    FilterResult,
)
from stillroom.curate.filter_rows import Row, read_filter_rows
from stillroom.curate.filter_rules import Knowledge, asked_text, num_tokens, success_of
from stillroom.curate.filter_sets import Reasons, judged
from stillroom.curate.rows import check_output
from stillroom.curate.verdicts import read_verdicts
from stillroom.data.render import ChatRenderer
from stillroom.data.row_files import rollout_files
from stillroom.files import atomic_output
from stillroom.lineage import Recording, record_written, write_manifest
from stillroom.settings import Workspace

_MAX_CATEGORIES = 50
_OTHERS = "(others)"
_Read = Callable[[], Iterator[Row]]


def filter_dataset(
    workspace: Workspace, request: FilterDataset, *, tokenizer: Any = None
) -> FilterResult:
    """Writes the rows that pass, untouched, and the others' reasons; returns the counts.

    `tokenizer` is the student's; what `request.model` asks for needs it.
    """
    source = workspace.existing(request.input, what="input")
    output = workspace.output_file(request.output, what="output")
    dropped_file = output.with_name(output.name + ".dropped")
    others = _other_inputs(workspace, request)
    for path in (output, dropped_file):
        check_output(path, [source, *others])
    read = functools.partial(read_filter_rows, source)
    renderer = ChatRenderer(tokenizer) if tokenizer is not None else None
    files = [*rollout_files(source), *(f for path in others for f in rollout_files(path))]
    with Recording(files) as recording:
        known = _knowledge(workspace, request, read, renderer)
        tally = _Tally(request, renderer)
        with atomic_output(output) as kept, atomic_output(dropped_file) as dropped:
            for row, reasons in judged(read, request, known):
                tally.add(row, reasons)
                if reasons:
                    dropped.write(_dropped_row(row, reasons))
                else:
                    kept.write_raw(row.line.line.data)
        write_manifest(
            output,
            written=kept,
            operation="filter_dataset",
            inputs=recording.records(),
            request=request.model_dump(mode="json"),
            counts={"read": tally.read, "kept": tally.kept},
            side=[record_written(dropped_file, dropped)],
        )
    return tally.result(workspace, output, dropped_file, set(known.verdicts))


def _other_inputs(workspace: Workspace, request: FilterDataset) -> list[Path]:
    names = [*request.decontaminate, *([request.verdicts] if request.verdicts else [])]
    return [workspace.existing(name, what="file") for name in names]


def _knowledge(
    workspace: Workspace, request: FilterDataset, read: _Read, renderer: ChatRenderer | None
) -> Knowledge:
    """Returns what the filters need to know; for some of them the rows are read once before."""
    verdicts = (
        read_verdicts(workspace.existing(request.verdicts, what="verdicts"))
        if request.verdicts
        else {}
    )
    paths = [workspace.existing(name, what="file") for name in request.decontaminate]
    prompts = [prompt for path in paths for prompt in evaluation_prompts(path)]
    index = ContaminationIndex(prompts) if prompts else None
    known: Counter[str] = Counter()
    succeeded: Counter[str] = Counter()
    if index is not None or request.min_success_rate is not None:
        for row in read():
            if row.facts is None:
                continue
            if index is not None:
                index.count_prompt(asked_text(row))
            # What infrastructure ended says nothing about its task.
            if row.facts.error is None and (success := success_of(row.facts)) is not None:
                known[row.task] += 1
                succeeded[row.task] += success
    if index is not None:
        index.close()
    rates = {task: succeeded[task] / count for task, count in known.items()}
    return Knowledge(renderer, rates, index, verdicts)


class _Measured:
    """How some rows are distributed."""

    def __init__(self) -> None:
        self._reward, self._turns = Histogram(), Histogram()
        self._characters, self._tokens = Histogram(), Histogram()
        self._categories: Counter[str] = Counter()

    def joined(self, other: "_Measured") -> "_Measured":
        """Returns how the rows of both are distributed."""
        both = _Measured()
        both._reward = self._reward.joined(other._reward)
        both._turns = self._turns.joined(other._turns)
        both._characters = self._characters.joined(other._characters)
        both._tokens = self._tokens.joined(other._tokens)
        both._categories = self._categories + other._categories
        return both

    def add(self, row: Row, category: str) -> None:
        self._categories[category] += 1
        if row.facts is None:
            return
        self._turns.add(row.facts.num_turns)
        self._characters.add(len(row.line.line.data))
        if row.facts.reward is not None:
            self._reward.add(row.facts.reward)
        if row.num_tokens is not None:
            self._tokens.add(row.num_tokens)

    def distributions(self) -> Distributions:
        return Distributions(
            reward=self._reward.quantiles(),
            turns=self._turns.quantiles(),
            characters=self._characters.quantiles(),
            tokens=self._tokens.quantiles(),
        )

    def categories(self) -> dict[str, int]:
        """Returns the counts by name; of many the largest, and the others together."""
        if len(self._categories) <= _MAX_CATEGORIES:
            return dict(sorted(self._categories.items()))
        largest = dict(self._categories.most_common(_MAX_CATEGORIES))
        return {**largest, _OTHERS: self._categories.total() - sum(largest.values())}


class _Tally:
    """What came in and what went out."""

    def __init__(self, request: FilterDataset, renderer: ChatRenderer | None) -> None:
        self._request, self._renderer = request, renderer
        self._kept_rows, self._dropped_rows = _Measured(), _Measured()
        self.read = self.kept = self._success_derived = 0
        self._dropped: Counter[str] = Counter()
        self._problems: list[str] = []
        self._ids: set[str] = set()

    def add(self, row: Row, reasons: Reasons) -> None:
        self.read += 1
        self.kept += not reasons
        category = row.category(self._request.category_field)
        if row.facts is not None:
            self._success_derived += row.facts.success is None
            if self._renderer is not None:
                num_tokens(row, self._renderer)
        (self._dropped_rows if reasons else self._kept_rows).add(row, category)
        if self._request.verdicts and row.review_id:
            self._ids.add(row.review_id)
        if not reasons:
            return
        self._dropped[reasons[0].text] += 1
        if row.line.problem and row.facts is None and len(self._problems) < MAX_EXAMPLES:
            self._problems.append(f"{row.line.where}: {row.line.problem}")

    def result(
        self, workspace: Workspace, output: Path, dropped_file: Path, verdicts: set[str]
    ) -> FilterResult:
        if unmatched := len(verdicts - self._ids):
            self._problems.append(f"{unmatched} of {len(verdicts)} verdicts name no row by its id")
        before, after = self._kept_rows.joined(self._dropped_rows), self._kept_rows
        return FilterResult(
            output=workspace.shown(output),
            read=self.read,
            kept=self.kept,
            dropped=dict(self._dropped),
            dropped_file=workspace.shown(dropped_file),
            before=before.distributions(),
            after=after.distributions(),
            categories_before=before.categories(),
            categories_after=after.categories(),
            success_derived=self._success_derived,
            problems=self._problems,
        )


def _dropped_row(row: Row, reasons: Reasons) -> DroppedRow:
    return DroppedRow(
        file=str(row.line.path),
        line=row.line.line.number,
        id=row.id,
        reasons=[reason.text for reason in reasons],
        like=next((reason.like for reason in reasons if reason.like), None),
    )

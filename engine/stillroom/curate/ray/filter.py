"""filter_dataset on a Ray cluster, with the same rows and counts as in one process.

Filters that judge a row by itself run in the task that reads its file. What needs all rows runs in
the driver, in the order of the rows: success rates and shared words before the rows are judged,
duplicates and categories after that. Finally, tasks read each file once more and write its rows.
"""

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.curate.filter.across_rows import (
    JudgedRows,
    PassedRows,
    TraitReader,
    Traits,
    judged_row,
)
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.filter.rules import Knowledge, RowJudge
from stillroom.curate.filter.run import (
    Filtering,
    FilterTally,
    RowWriter,
    TaskSurvey,
    evaluation_index,
    open_filtering,
    read_rows_to_filter,
    review_verdicts,
)
from stillroom.curate.ray.parts import RayParts, WrittenPart, ray_parts
from stillroom.curate.sources import RowInputs
from stillroom.data.chat.render import ChatRenderer
from stillroom.files import atomic_output
from stillroom.lineage import FileRecord, record_file
from stillroom.models.tokenizer import tokenizer_for
from stillroom.settings import Workspace


@dataclass(frozen=True, slots=True)
class _Common:
    """What all tasks share: the workspace's root, the request and the filters' knowledge."""

    root: Path
    request: FilterDataset
    known: Knowledge
    """The knowledge of the filters, without the renderer, which each process makes for itself."""
    inputs: RowInputs

    def with_renderer(self) -> Knowledge:
        """Returns the knowledge with a renderer, which this process makes if a model is named."""
        renderer = None if self.request.model is None else _renderer(self.root, self.request.model)
        known = self.known
        return Knowledge(renderer, known.success_rates, known.evaluation, known.verdicts)


@dataclass(frozen=True, slots=True)
class _JudgedFile:
    """How the rows of a file are judged, and the traits of those that have passed so far."""

    rows: JudgedRows
    compared: list[Traits | None]


def filter_on_ray(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Does what `filter_dataset` does, with Ray tasks that take one file each."""
    tally, records = FilterTally(request), list[FileRecord]()
    with (
        open_filtering(workspace, request) as filtering,
        ray_parts(request.ray_address, filtering.output.path) as parts,
    ):
        known = _knowledge(workspace, request, parts, filtering)
        common = _Common(workspace.root, request, known, filtering.inputs)
        for kept, dropped, record in parts.each(_write, _jobs(parts, filtering.files, common)):
            kept.append_to(filtering.output.rows)
            dropped.append_to(filtering.dropped)
            tally.take(kept.tally)
            records.append(record)
        filtering.drop_refused(tally)
        records += map(record_file, filtering.other_files)
        filtering.record(tally, records)
        return filtering.result(tally, known)


def _knowledge(
    workspace: Workspace, request: FilterDataset, parts: RayParts, filtering: Filtering
) -> Knowledge:
    verdicts = review_verdicts(workspace, request, filtering.rows)
    index = evaluation_index(workspace, request)
    survey = TaskSurvey(request, index)
    if survey.is_needed:
        shared = None if index is None else parts.ray.put(index)
        jobs = ((file, request, shared) for file in filtering.files)
        for part in parts.each(_survey, jobs):
            survey.take(part)
    if index is not None:
        index.close()
    return Knowledge(None, survey.success_rates(), index, verdicts)


def _survey(file: Path, request: FilterDataset, shared_index: Any) -> TaskSurvey:
    """Surveys a file; `shared_index` refers to the index of evaluation prompts, if there is one."""
    survey = TaskSurvey(request, None if shared_index is None else _fetched(shared_index))
    survey.prompts = []
    for row in read_rows_to_filter(file):
        survey.add(row)
    survey.forget_index()
    return survey


def _jobs(parts: RayParts, files: list[Path], common: _Common) -> Iterator[tuple[Any, ...]]:
    request = common.request
    # In the object store it is sent once, instead of with each task.
    shared = parts.ray.put(common)
    judged: list[JudgedRows | None] = [None] * len(files)
    if request.compares_rows:
        judged_files = list(parts.each(_judge, ((file, shared) for file in files)))
        _decide(request, judged_files)
        judged = [file.rows for file in judged_files]
    for number, (file, rows) in enumerate(zip(files, judged, strict=True)):
        yield file, shared, rows, parts.path(number, "kept"), parts.path(number, "dropped")


def _judge(file: Path, shared: Any) -> _JudgedFile:
    common: _Common = _fetched(shared)
    judge, reader = RowJudge(common.request, common.with_renderer()), TraitReader(common.request)
    judged = _JudgedFile(JudgedRows(), [])
    for row in read_rows_to_filter(file):
        reasons, compared = judged_row(row, judge, reader)
        judged.rows.add(row, reasons)
        judged.compared.append(compared)
    return judged


def _decide(request: FilterDataset, judged_files: list[_JudgedFile]) -> None:
    """Adds the reasons that come from comparing rows, in the order of the rows."""
    passed = PassedRows(request)
    places: list[tuple[JudgedRows, int]] = []
    for judged in judged_files:
        for number, traits in enumerate(judged.compared):
            if traits is not None:
                passed.add(len(places), traits)
                places.append((judged.rows, number))
    for position, reason in passed.dropped().items():
        rows, number = places[position]
        rows.reasons[number] = (reason,)


def _write(
    file: Path, shared: Any, judged: JudgedRows | None, kept_path: Path, dropped_path: Path
) -> tuple[WrittenPart[FilterTally], WrittenPart[None], FileRecord]:
    """Writes the rows of a file; without `judged`, each row is judged by itself."""
    common: _Common = _fetched(shared)
    known, request = common.with_renderer(), common.request
    tally, rows = FilterTally(request), read_rows_to_filter(file)
    judge = RowJudge(request, known)
    with atomic_output(kept_path) as kept, atomic_output(dropped_path) as dropped:
        writer = RowWriter(
            request, tally, known.renderer, kept=kept, dropped=dropped, inputs=common.inputs
        )
        for row, reasons in (
            judged.read_again(rows) if judged else ((row, judge.reasons(row)) for row in rows)
        ):
            writer.write(row, reasons)
    return (
        WrittenPart(kept_path, tally.kept, tally),
        WrittenPart(dropped_path, tally.read - tally.kept, None),
        record_file(file),
    )


def _fetched(reference: Any) -> Any:
    """Returns the value that the driver has put into the object store."""
    ray: Any = importlib.import_module("ray")
    return ray.get(reference)


@functools.lru_cache(maxsize=1)
def _renderer(root: Path, model: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_for(Workspace(root), model, "counting tokens"))

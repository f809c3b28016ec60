"""filter_dataset on a Ray cluster, with the same rows and counts as in one process.

Filters that judge a row by itself run in the task that reads its file. What needs all rows runs in
the driver, in the order of the rows: success rates and shared words before the rows are judged,
duplicates and categories after that. Finally, tasks read each file once more and write its rows.
"""

import functools
import importlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.curate.filter.across_rows import (
    PassedRows,
    TraitReader,
    Traits,
    changed_input,
    judged_row,
)
from stillroom.curate.filter.contamination import ContaminationIndex
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.filter.rules import (
    Knowledge,
    Reasons,
    RowJudge,
)
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
from stillroom.curate.ray.parts import RayParts, ray_parts
from stillroom.curate.rows import CuratedRow
from stillroom.curate.sources import RowInputs
from stillroom.data.chat.render import ChatRenderer
from stillroom.files import LineWriter, atomic_output
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
class _SurveyJob:
    file: Path
    request: FilterDataset
    index: Any
    """The Ray reference to a ContaminationIndex; None if there is no evaluation prompt."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """How the rows of a file are judged, and the traits of those that have passed so far."""

    reasons: list[Reasons]
    sizes: "array[int]"
    tokens: "array[int]"
    """The number of tokens of each row; -1 if they were not counted."""
    compared: list[Traits | None]


@dataclass(frozen=True, slots=True)
class _JudgeJob:
    file: Path
    common: Any


@dataclass(frozen=True, slots=True)
class _WriteJob:
    file: Path
    common: Any
    judged: _Judged | None
    """How the rows are judged; None if the task judges each row by itself as it writes."""
    kept: Path
    dropped: Path


@dataclass(frozen=True, slots=True)
class _Part:
    kept: Path
    dropped: Path
    tally: FilterTally
    source: FileRecord


def filter_on_ray(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Does what `filter_dataset` does, with Ray tasks that take one file each."""
    tally, records = FilterTally(request), list[FileRecord]()
    with (
        open_filtering(workspace, request) as filtering,
        ray_parts(request.ray_address, filtering.output.path) as parts,
    ):
        known = _knowledge(workspace, request, parts, filtering)
        common = _Common(workspace.root, request, known, filtering.inputs)
        for part in parts.each(_write, _jobs(parts, filtering.files, common)):
            _append(filtering.output.rows, part.kept, part.tally.kept)
            _append(filtering.dropped, part.dropped, part.tally.read - part.tally.kept)
            tally.take(part.tally)
            records.append(part.source)
        filtering.drop_refused(tally)
        records += map(record_file, filtering.other_files)
        filtering.record(tally, records)
        return filtering.result(tally, known)


def _append(rows: LineWriter, part: Path, num_rows: int) -> None:
    rows.append_file(part, num_rows=num_rows)
    part.unlink()


def _knowledge(
    workspace: Workspace, request: FilterDataset, parts: RayParts, filtering: Filtering
) -> Knowledge:
    verdicts = review_verdicts(workspace, request, filtering.rows)
    index = evaluation_index(workspace, request)
    survey = TaskSurvey(request, index)
    if survey.is_needed:
        shared = None if index is None else parts.ray.put(index)
        for part in parts.each(
            _survey, [_SurveyJob(file, request, shared) for file in filtering.files]
        ):
            survey.take(part)
    if index is not None:
        index.close()
    return Knowledge(None, survey.success_rates(), index, verdicts)


def _survey(job: _SurveyJob) -> TaskSurvey:
    index: ContaminationIndex | None = None if job.index is None else _fetched(job.index)
    survey = TaskSurvey(job.request, index)
    survey.prompts = []
    for row in read_rows_to_filter(job.file):
        survey.add(row)
    survey.forget_index()
    return survey


def _jobs(parts: RayParts, files: list[Path], common: _Common) -> Iterator[_WriteJob]:
    request = common.request
    # In the object store it is sent once, instead of with each task.
    shared = parts.ray.put(common)
    judged: list[_Judged | None] = [None] * len(files)
    if request.dedupe is not None or request.max_per_category is not None:
        judged_files = list(parts.each(_judge, [_JudgeJob(file, shared) for file in files]))
        _decide(request, judged_files)
        judged = [*judged_files]
    for number, (file, verdicts) in enumerate(zip(files, judged, strict=True)):
        kept, dropped = parts.path(number, "kept"), parts.path(number, "dropped")
        yield _WriteJob(file, shared, verdicts, kept, dropped)


def _judge(job: _JudgeJob) -> _Judged:
    common: _Common = _fetched(job.common)
    judge, reader = RowJudge(common.request, common.with_renderer()), TraitReader(common.request)
    judged = _Judged([], array("q"), array("q"), [])
    for row in read_rows_to_filter(job.file):
        reasons, compared = judged_row(row, judge, reader)
        judged.reasons.append(reasons)
        judged.compared.append(compared)
        judged.sizes.append(row.line.num_bytes)
        judged.tokens.append(-1 if row.num_tokens is None else row.num_tokens)
    return judged


def _decide(request: FilterDataset, judged_files: list[_Judged]) -> None:
    """Adds the reasons that come from comparing rows, in the order of the rows."""
    passed = PassedRows(request)
    places: list[tuple[_Judged, int]] = []
    for judged in judged_files:
        for number, traits in enumerate(judged.compared):
            if traits is not None:
                passed.add(len(places), traits)
                places.append((judged, number))
        # Only the reasons go back to the workers.
        judged.compared.clear()
    for position, reason in passed.dropped().items():
        judged, number = places[position]
        judged.reasons[number] = (reason,)


def _write(job: _WriteJob) -> _Part:
    common: _Common = _fetched(job.common)
    known = common.with_renderer()
    tally = FilterTally(common.request)
    rows = _judged_rows(job, common.request, known)
    with atomic_output(job.kept) as kept, atomic_output(job.dropped) as dropped:
        writer = RowWriter(
            common.request,
            tally,
            known.renderer,
            kept=kept,
            dropped=dropped,
            inputs=common.inputs,
        )
        for row, reasons in rows:
            writer.write(row, reasons)
    return _Part(job.kept, job.dropped, tally, record_file(job.file))


def _judged_rows(
    job: _WriteJob, request: FilterDataset, known: Knowledge
) -> Iterator[tuple[CuratedRow, Reasons]]:
    if job.judged is None:
        judge = RowJudge(request, known)
        yield from ((row, judge.reasons(row)) for row in read_rows_to_filter(job.file))
        return
    judged, number = job.judged, -1
    for number, row in enumerate(read_rows_to_filter(job.file)):
        if number >= len(judged.sizes) or judged.sizes[number] != row.line.num_bytes:
            raise changed_input(job.file)
        if judged.tokens[number] >= 0:
            row.num_tokens = judged.tokens[number]
        yield row, judged.reasons[number]
    if number + 1 != len(judged.sizes):
        raise changed_input(job.file)


def _fetched(reference: Any) -> Any:
    """Returns the value that the driver has put into the object store."""
    ray: Any = importlib.import_module("ray")
    return ray.get(reference)


@functools.lru_cache(maxsize=1)
def _renderer(root: Path, model: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_for(Workspace(root), model, "counting tokens"))

"""filter_dataset on a Ray cluster, with the same result as in one process.

Filters that judge a row by itself run in the task that reads its file. Anything that needs all rows
runs in the driver, in the order of the rows: success rates and boilerplate before the rows are
judged, duplicates and categories afterwards. Finally, tasks read the files again to write the rows.
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
    judge_row,
)
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.filter.rules import FilterContext, RowJudge
from stillroom.curate.filter.run import (
    Filtering,
    FilterTally,
    RowWriter,
    TaskSurvey,
    evaluation_index,
    match_verdicts,
    open_filtering,
)
from stillroom.curate.ray.parts import RaySession, WrittenPart, ray_session
from stillroom.curate.rows import read_curated_rows
from stillroom.curate.sources import RowInputs
from stillroom.data.chat.render import ChatRenderer
from stillroom.files import atomic_output
from stillroom.lineage import FileRecord, record_file
from stillroom.models.tokenizer import tokenizer_for
from stillroom.settings import Workspace


@dataclass(frozen=True, slots=True)
class _TaskInput:
    """The input that all Ray tasks share."""

    root: Path
    """The root folder of the workspace."""
    request: FilterDataset
    context: FilterContext
    """The context of the filters without the renderer, which each process makes for itself."""
    inputs: RowInputs

    def filter_context(self) -> FilterContext:
        """Returns the context of the filters, with a renderer if the request names a model."""
        request, context = self.request, self.context
        renderer = None
        if request.model is not None:
            renderer = _renderer(self.root, request.model, request.chat_template)
        return FilterContext(renderer, context.success_rates, context.evaluation, context.verdicts)


@dataclass(frozen=True, slots=True)
class _JudgedFile:
    """The reasons to drop each row of a file, and the traits of the rows that have no reason."""

    rows: JudgedRows
    traits: list[Traits | None]


def filter_on_ray(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Filters rows as `filter_dataset` does, with one Ray task per file."""
    tally, records = FilterTally(request), list[FileRecord]()
    with (
        open_filtering(workspace, request) as filtering,
        ray_session(request.ray_address, filtering.output.path) as session,
    ):
        context = _filter_context(workspace, request, session, filtering)
        task_input = _TaskInput(workspace.root, request, context, filtering.inputs)
        for kept, dropped, record in session.map(
            _write_rows, _write_jobs(session, filtering.files, task_input)
        ):
            kept.append_to(filtering.output.rows)
            dropped.append_to(filtering.dropped)
            tally.merge(kept.tally)
            records.append(record)
        filtering.drop_refused(tally)
        records += map(record_file, filtering.other_files)
        filtering.record(tally, records)
        return filtering.result(tally, context)


def _filter_context(
    workspace: Workspace, request: FilterDataset, session: RaySession, filtering: Filtering
) -> FilterContext:
    """Returns the context of the filters; if they need it, Ray tasks survey all files."""
    verdicts = match_verdicts(workspace, request, filtering.rows)
    index = evaluation_index(workspace, request)
    survey = TaskSurvey(request, index)
    if survey.is_needed:
        shared = None if index is None else session.ray.put(index)
        jobs = ((file, request, shared) for file in filtering.files)
        for file_survey in session.map(_survey_file, jobs):
            survey.merge(file_survey)
    if index is not None:
        index.finish_counting()
    return FilterContext(None, survey.success_rates(), index, verdicts)


def _survey_file(file: Path, request: FilterDataset, shared_index: Any) -> TaskSurvey:
    """Surveys a file; `shared_index` is a reference to the index of evaluation prompts, or None."""
    survey = TaskSurvey(request, None if shared_index is None else _get_shared(shared_index))
    survey.prompts = []
    for row in read_curated_rows(file, with_supervised=True):
        survey.add(row)
    survey.forget_index()
    return survey


def _write_jobs(
    session: RaySession, files: list[Path], task_input: _TaskInput
) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of `_write_rows`; first judges all rows if the filters compare them."""
    request = task_input.request
    # An object in the store is sent to each worker once, instead of with each task.
    shared = session.ray.put(task_input)
    judged: list[JudgedRows | None] = [None] * len(files)
    if request.compares_rows:
        judged_files = list(session.map(_judge_file, ((file, shared) for file in files)))
        _add_comparison_reasons(request, judged_files)
        judged = [file.rows for file in judged_files]
    for number, (file, rows) in enumerate(zip(files, judged, strict=True)):
        yield file, shared, rows, session.path(number, "kept"), session.path(number, "dropped")


def _judge_file(file: Path, shared: Any) -> _JudgedFile:
    """Judges each row of a file by itself, as a Ray task."""
    task_input: _TaskInput = _get_shared(shared)
    judge, reader = (
        RowJudge(task_input.request, task_input.filter_context()),
        TraitReader(task_input.request),
    )
    judged = _JudgedFile(JudgedRows(), [])
    for row in read_curated_rows(file, with_supervised=True):
        reasons, traits = judge_row(row, judge, reader)
        judged.rows.add(row, reasons)
        judged.traits.append(traits)
    return judged


def _add_comparison_reasons(request: FilterDataset, judged_files: list[_JudgedFile]) -> None:
    """Compares the rows that have passed, in order, and records the reasons to drop them."""
    passed = PassedRows(request)
    passed_rows: list[tuple[JudgedRows, int]] = []
    for judged in judged_files:
        for number, traits in enumerate(judged.traits):
            if traits is not None:
                passed.add(len(passed_rows), traits)
                passed_rows.append((judged.rows, number))
    for position, reason in passed.reasons_to_drop().items():
        rows, number = passed_rows[position]
        rows.reasons[number] = (reason,)


def _write_rows(
    file: Path, shared: Any, judged: JudgedRows | None, kept_path: Path, dropped_path: Path
) -> tuple[WrittenPart[FilterTally], WrittenPart[None], FileRecord]:
    """Writes the rows of a file; without `judged`, it judges each row by itself."""
    task_input: _TaskInput = _get_shared(shared)
    context, request = task_input.filter_context(), task_input.request
    tally, rows = FilterTally(request), read_curated_rows(file, with_supervised=True)
    judge = RowJudge(request, context)
    with atomic_output(kept_path) as kept, atomic_output(dropped_path) as dropped:
        writer = RowWriter(
            tally, context.renderer, kept=kept, dropped=dropped, inputs=task_input.inputs
        )
        for row, reasons in (
            judged.read_again(rows) if judged else ((row, judge.reasons(row)) for row in rows)
        ):
            writer.write(row, reasons)
    return (
        WrittenPart(kept_path, tally.num_kept, tally),
        WrittenPart(dropped_path, tally.num_read - tally.num_kept, None),
        record_file(file),
    )


def _get_shared(reference: Any) -> Any:
    """Returns an object that the driver has put into Ray's object store."""
    ray: Any = importlib.import_module("ray")
    return ray.get(reference)


@functools.lru_cache(maxsize=1)
def _renderer(root: Path, model: str, chat_template: str | None) -> ChatRenderer:
    tokenizer = tokenizer_for(
        Workspace(root), model, "counting tokens", chat_template=chat_template
    )
    return ChatRenderer(tokenizer)

"""Operations on data files. They run in the call, or in a run of their own for large files."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from pydantic import BaseModel

from stillroom.api.operations import child_work
from stillroom.api.start_runs import planned_bytes, start_large_run
from stillroom.curate import convert, pairs, review
from stillroom.curate.convert import ConvertResult, ConvertRollouts
from stillroom.curate.filter import run as filters
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.pairs import MakeDpoPairs, PairsResult
from stillroom.curate.review import ReviewSample, SampleForReview
from stillroom.curate.sources import (
    RowInputs,
    files_to_import_for_validation,
    open_rows,
    unread_file_notes,
)
from stillroom.data import inspect as inspection
from stillroom.data import validate as validation
from stillroom.data.chat.views import RowView
from stillroom.data.inspect import ExamplesPage, InspectExamples, Inspection
from stillroom.data.row_files import rollout_files
from stillroom.data.token_counts import CountTokens, TokenCounts
from stillroom.data.validate import ValidateDataset, ValidationReport
from stillroom.errors import EngineError, InputError
from stillroom.importing.input_files import input_files, is_compressed
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.jobs.child import run_in_child
from stillroom.jobs.operations import Operation
from stillroom.lineage import read_manifest
from stillroom.models.chat_template import template_source
from stillroom.models.resolve import locate_model
from stillroom.outputs import check_page
from stillroom.rollout.rewards.rewards import gives_expected_answer
from stillroom.rollout.sources import source_files
from stillroom.settings import Workspace
from stillroom.trace.request import ShowLineage
from stillroom.train.config.request import PlanTraining

LARGE_BYTES = 4 << 20
"""The total size of files, in bytes, above which an operation becomes a run."""
_HASH_SPEEDUP = 64
"""How much faster hashing a file, or counting its rows, is than judging the rows."""
_COMPRESSION_RATIO = 10
"""The typical ratio of a log's size to its compressed size."""
_MAX_MANIFESTS = 50
SOURCE_FIELDS = (
    "path",
    "input",
    "own",
    "chosen_from",
    "rejected_from",
    "decontaminate",
    "verdicts",
)
"""The fields of requests that name files with rows, whose size decides whether a run is started."""


def import_rollouts(workspace: Workspace, request: ImportRollouts) -> ImportResult:
    """Imports rollouts from logs, traces, sessions or datasets of other systems.

    Writes request.output, its manifest, and if rows are refused a side file with the reasons. The
    work runs in a child process, since some readers need heavy libraries.
    Raises EngineError if there is nothing to read or the output is another program's file, and
    RunError if the child crashes or takes too long.
    """
    work = child_work("import_rollouts")
    return run_in_child(
        workspace, work, request, result=ImportResult, secrets=_secrets_to_redact(workspace)
    )


def _secrets_to_redact(workspace: Workspace) -> dict[str, str]:
    """Returns the user's secrets for a child process, which removes them from the rows.

    They are passed on, since the child has no keys in its environment.
    """
    return {f"SECRET_{n}": key for n, key in enumerate(workspace.redactor().secrets)}


def filter_dataset(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Writes the rows that pass all filters, and the others with reasons to a side file.

    Rows are copied byte for byte. Filters that need Ray or a heavy library, or are slow per row,
    run in a child process.
    Raises EngineError if an input is missing or has no known format, or if the output is another
    program's file, and RunError if the child crashes or takes too long.
    """
    _check_student(workspace, request)
    if not request.is_heavy:
        return filters.filter_dataset(workspace, request)
    return run_in_child(
        workspace,
        child_work("filter_dataset"),
        request,
        result=FilterResult,
        secrets=_secrets_to_redact(workspace),
    )


def convert_rollouts(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Converts rollouts to supervised rows; on a Ray cluster, each task converts one file.

    With a cluster or a `rewrite` function, the work runs in a child process.
    Raises EngineError if an input is missing, no row could be converted, or the output is another
    program's file, and RunError if the child crashes or takes too long.
    """
    if request.ray_address is None and request.rewrite is None:
        return convert.convert_rollouts(workspace, request)
    return run_in_child(
        workspace,
        child_work("convert_rollouts"),
        request,
        result=ConvertResult,
        secrets=_secrets_to_redact(workspace),
    )


def make_dpo_pairs(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Writes pairs of better and worse rollouts of the same task.

    On a Ray cluster the work is split by file and task.
    Raises EngineError if an input is missing, there are no pairs, or the output is another
    program's file, and RunError if the child crashes or takes too long.
    """
    if request.ray_address is None:
        return pairs.make_dpo_pairs(workspace, request)
    return run_in_child(
        workspace,
        child_work("make_dpo_pairs"),
        request,
        result=PairsResult,
        secrets=_secrets_to_redact(workspace),
    )


def sample_for_review(workspace: Workspace, request: SampleForReview) -> ReviewSample:
    """Writes a sample of rows for a person to judge: a JSONL file, and a page for the verdicts.

    The page is next to the JSONL file and ends in .html. Raises DataError if no row can be
    reviewed, and InputError if the output already has rollouts or verdicts.
    """
    from stillroom.report.data_pages import write_review_page

    sampled = review.sample_for_review(workspace, request)
    write_review_page(sampled)
    return sampled.result


def validate_dataset(workspace: Workspace, request: ValidateDataset) -> ValidationReport:
    """Returns a data file's problems and statistics, and writes a page about them.

    With a model, it also counts the tokens of a sample of the rows, in a child process. Bad rows
    are in the report and raise nothing.
    Raises DataError if the file is empty or none of its rows has a known format, and EngineError
    if the model has no usable tokenizer or chat template.
    """
    _check_student(workspace, request)
    path = workspace.existing(request.path, label="path")
    if request.format != "auto":
        return _validate(workspace, request, None)
    with open_rows(workspace, request.path, output=workspace.root / path.name) as rows:
        imported = next(iter(rows.imported.values()), None)
        if imported is None:
            return _validate(workspace, request, None)
        formats = {name: count.kept for name, count in imported.result.formats.items()}
        refused = [(row.source, f"{row.reason} {row.detail}") for row in imported.refused()]
        log = validation.ImportedRows(imported.path, formats, refused)
        return _validate(workspace, request, log)


def _validate(
    workspace: Workspace, request: ValidateDataset, imported: validation.ImportedRows | None
) -> ValidationReport:
    """Validates a file, or the rows imported from it; counts tokens and writes the page."""
    checked = validation.validate_dataset(
        workspace, request, imported=imported, answer_check=gives_expected_answer
    )
    report, counts = checked.report, None
    if imported is None:
        notes = [*unread_file_notes(workspace, request.path), *report.notes]
        report = msgspec.structs.replace(report, notes=notes)
    if request.model is not None and report.good:
        places = tuple(msgspec.structs.astuple(position) for position in checked.statistics.sampled)
        counting = CountTokens(
            model=request.model,
            chat_template=request.chat_template,
            format=checked.row_format,
            places=places,
        )
        counts = run_in_child(
            workspace, child_work("validate_dataset"), counting, result=TokenCounts
        )
        report = msgspec.structs.replace(
            report,
            tokens=counts.tokens,
            trained_tokens=counts.trained,
            token_rows=counts.rows,
            left_out=counts.left_out,
        )
    if checked.page is not None:
        from stillroom.report.data_pages import write_dataset_page

        write_dataset_page(checked.page, report, checked.statistics, counts)
    return report


def inspect_examples(workspace: Workspace, request: InspectExamples) -> ExamplesPage:
    """Returns rows as text, and writes a page of them if the request asks for it.

    With a model, a child process renders the rows, with marks around the trained tokens.
    Raises InputError if `start` is beyond the last row, and EngineError if the model has no usable
    tokenizer or chat template.
    """
    page = workspace.output_file(request.html, label="html") if request.html else None
    if page is not None:
        check_page(page, overwrite=request.overwrite)
    path = workspace.existing(request.path, label="path")
    _check_student(workspace, request)
    with open_rows(workspace, request.path, output=workspace.root / path.name) as rows:
        inspected = _inspect(workspace, request, rows)
    if page is None:
        return inspected.page
    # Imported here so that the server loads the page code only when needed.
    from stillroom.report.data_pages import write_rows_page

    write_rows_page(page, inspected, request)
    return msgspec.structs.replace(inspected.page, html=workspace.shown(page))


def _check_student(
    workspace: Workspace, request: FilterDataset | InspectExamples | ValidateDataset
) -> None:
    """Raises EngineError if the request's model or chat template does not exist."""
    if request.model is not None:
        locate_model(workspace, request.model)
    elif request.chat_template is not None:
        raise InputError(
            "chat_template needs model: the student whose template it replaces",
            "set model, or leave chat_template out",
        )
    template_source(workspace, request.chat_template)


def _inspect(workspace: Workspace, request: InspectExamples, rows: RowInputs) -> Inspection:
    """Returns the requested rows; imported rows with their places in the original log."""
    imported = next(iter(rows.imported.values()), None)
    if imported is not None:
        request = request.model_copy(update={"path": str(imported.path)})
    if request.model is None:
        inspected = inspection.inspect_examples(workspace, request)
    else:
        inspected = run_in_child(
            workspace, child_work("inspect_examples"), request, result=Inspection
        )
    if imported is None:
        return inspected
    places = [
        f"{Path(file).name}:{line}"
        for file, line in (
            rows.original_location(imported.path, number + 1)
            for number in range(request.start, request.start + len(inspected.rows))
        )
    ]
    examples = [
        msgspec.structs.replace(each, where=where)
        for each, where in zip(inspected.page.examples, places, strict=True)
    ]
    views = [
        msgspec.structs.replace(each, where=where)
        for each, where in zip(inspected.rows, places, strict=True)
    ]
    return Inspection(page=msgspec.structs.replace(inspected.page, examples=examples), rows=views)


def view_row(workspace: Workspace, where: str, data: bytes, *, model: str | None = None) -> RowView:
    """Returns one row for a page; with a model, also its tokens with the trained ones marked.

    where: the name of the row that the result shows. data: the row as one line of JSON.
    A child process renders the tokens. Raises EngineError if the model has no tokenizer.
    """
    if model is None:
        return inspection.row_view(where, data)
    locate_model(workspace, model)
    with tempfile.TemporaryDirectory(prefix="stillroom-row-") as folder:
        file = Path(folder) / "row.jsonl"
        file.write_bytes(data + b"\n")
        # With html set, all tokens that fit on a page are returned; no page is written.
        request = InspectExamples(path=str(file), n=1, model=model, html="row.html")
        inspected = run_in_child(
            workspace, child_work("inspect_examples"), request, result=Inspection
        )
    return msgspec.structs.replace(inspected.rows[0], where=where)


def carry_out(workspace: Workspace, operation: Operation, request: BaseModel) -> msgspec.Struct:
    """Runs an operation and returns its result, or for large files the report of a new run.

    The files of the request are large if they have more than 4 MiB (LARGE_BYTES) together. Raises
    the errors of the operation's function.
    """
    if operation.run_if_large is not None and _input_bytes(workspace, request) > LARGE_BYTES:
        inputs = [] if isinstance(request, ShowLineage) else list(_input_files(workspace, request))
        return start_large_run(workspace, operation.run_if_large, request, inputs=inputs)
    return operation.call(workspace, request)


def _input_bytes(workspace: Workspace, request: BaseModel) -> int:
    """Returns the size in bytes of the files that a request reads; 0 if one cannot be found.

    Files that are only hashed or counted count for a fraction of their size. The operation itself
    reports a missing file.
    """
    try:
        if isinstance(request, PlanTraining):
            return planned_bytes(workspace, request)
        if isinstance(request, ShowLineage):
            num_bytes = sum(_lineage_sizes(workspace, request))
            return num_bytes if request.row is not None else num_bytes // _HASH_SPEEDUP
        num_bytes = sum(map(_content_size, _input_files(workspace, request)))
        # Without a model, only the requested rows are read; the others are only counted.
        only_counts_rows = (
            isinstance(request, InspectExamples)
            and request.model is None
            and files_to_import_for_validation(workspace, request.path) is None
        )
        return num_bytes // _HASH_SPEEDUP if only_counts_rows else num_bytes
    except (EngineError, OSError):
        return 0


def _content_size(file: Path) -> int:
    """Returns the size of a file in bytes, estimated after decompression if it is compressed."""
    return file.stat().st_size * (_COMPRESSION_RATIO if is_compressed(file) else 1)


def _input_files(workspace: Workspace, request: BaseModel) -> Iterator[Path]:
    """Yields the files with rows that a request names."""
    if isinstance(request, ImportRollouts):
        yield from input_files(workspace, request.inputs)
        return
    for field in SOURCE_FIELDS:
        value = getattr(request, field, None) or ()
        names: Iterable[str] = [value] if isinstance(value, str) else value
        for name in names:
            path = workspace.path(name)
            try:
                yield from rollout_files(path) if path.exists() else _source_paths(workspace, name)
            except EngineError:
                # A folder or pattern that only import_rollouts can read, or that does not exist.
                yield from input_files(workspace, [name])


def _source_paths(workspace: Workspace, name: str) -> Iterator[Path]:
    return (source.path for source in source_files(workspace, name))


def _lineage_sizes(workspace: Workspace, request: ShowLineage) -> Iterator[int]:
    """Yields the sizes of the files in a lineage, following the manifests."""
    path = workspace.existing(request.path, label="path")
    waiting, seen = [path], {path}
    while waiting and len(seen) <= _MAX_MANIFESTS:
        path = waiting.pop()
        yield path.stat().st_size if path.is_file() else 0
        manifest = read_manifest(path)
        for record in manifest.inputs if manifest is not None else ():
            input_path = Path(record.path)
            if input_path not in seen and input_path.exists():
                seen.add(input_path)
                waiting.append(input_path)

"""validate_dataset: finds every problem of a data file, with its line, and describes good rows."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import AfterValidator, Field

from stillroom import fences
from stillroom.data.checks import Problem
from stillroom.data.distribution import Quantiles
from stillroom.data.formats import CHECKS, RowFormat, detect_format, unread_key_problems
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines, rollout_files
from stillroom.data.row_names import row_hash
from stillroom.data.row_notes import later_system_notes, tools_notes
from stillroom.data.statistics import DatasetStatistics, RowPosition, missing_field_note
from stillroom.errors import DataError
from stillroom.files import LineWriter, atomic_output
from stillroom.lines import read_lines
from stillroom.outputs import ReplacingRequest, check_page, foreign_file_error
from stillroom.settings import Workspace
from stillroom.types import Message, OthersText, OwnText

AUTO, NONE = "auto", "none"
_MAX_EXAMPLES = 3


def _validate_report_name(name: str) -> str:
    if name not in (AUTO, NONE) and not name.endswith(".html"):
        raise ValueError(f"{name!r} must be {AUTO}, {NONE}, or a name that ends with .html")
    return name


class ValidateDataset(ReplacingRequest):
    """The request to check the rows of a data file and describe them."""

    path: Annotated[str, Field(description="Data file or folder")]
    format: Annotated[
        Literal["auto", "prompts", "rollouts", "sft", "dpo"],
        Field(description="auto: by the first good row"),
    ] = "auto"
    max_problems: Annotated[int, Field(ge=1, le=1000)] = 20
    category_field: str = "task_type"
    model: Annotated[str | None, Field(description="Student, to count tokens")] = None
    chat_template: str | None = None
    report: Annotated[
        str,
        AfterValidator(_validate_report_name),
        Field(description="HTML page; auto: in reports/; none"),
    ] = AUTO


class RowProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a row, and the line where it is."""

    where: str
    """The file and the number of the line, as `file:line`."""
    field: str
    """The field of the row. Keys that are not plain names are only in `problem`."""
    problem: OthersText
    fix: OwnText


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a data file. `rows` is always `good` + `bad`."""

    path: str
    format: str
    rows: int
    good: int
    bad: int
    num_problems: int
    problems: list[RowProblem]
    duplicates: int
    """The number of good rows with the same conversation and metadata as an earlier row.

    These are the `copies`, and equal answers that were sampled independently.
    """
    copies: int
    """The number of good rows that are byte for byte equal to an earlier row."""
    size_bytes: int
    """The size of all rows, good and bad, in bytes."""
    messages: Quantiles | None
    """The number of messages per good row; like the next three fields, None without good rows."""
    turns: Quantiles | None
    """The number of assistant messages per good row."""
    characters: Quantiles | None
    """The number of characters in texts and tool calls per good row."""
    rewards: Quantiles | None
    categories: dict[str, int]
    layouts: dict[OwnText, int]
    """The number of good rollouts in each layout or format, e.g. stillroom, rnow or litellm."""
    failed: int
    """The number of good rollouts that an infrastructure failure ended; they have no reward."""
    success_unknown: int
    """The number of good rollouts without `success`; curation infers it from reward or answer."""
    tokens: Quantiles | None = None
    """The student's tokens per row, for `token_rows` good rows; None without a student."""
    trained_tokens: Quantiles | None = None
    token_rows: int | None = None
    """The number of good rows whose tokens were counted; None without a student."""
    left_out: dict[OwnText, int] = {}
    """The number of those rows that training would leave out, by reason."""
    notes: list[OwnText] = []
    """Notes on good rows that may not teach what the user expects."""
    report: str | None = None
    """The path of the page; None if no page was written."""
    problems_file: str | None = None
    """The path of the file with all problems, one per line; None without problems or page."""


@dataclass(frozen=True, slots=True)
class DatasetValidation:
    """The report of a validation, and the statistics for its page."""

    report: ValidationReport
    statistics: DatasetStatistics
    row_format: RowFormat
    page: Path | None
    """The path at which the caller writes the page; None if no page is requested."""


@dataclass(frozen=True, slots=True)
class ImportedRows:
    """The rows of another system's files, as import_rollouts read them."""

    path: Path
    """The file with the rollouts."""
    formats: Mapping[str, int]
    """The number of rollouts in each format."""
    refused: Sequence[tuple[str, str]]
    """The location (`file:line`) of each row that is not a conversation, and the reason."""


AnswerCheck = Callable[[list[Message], dict[str, Any]], bool | None]
"""Returns whether messages end with the answer that metadata expects; None if it has none."""


class _ExpectedAnswers:
    """Counts the supervised rows whose answer is not the `expected_answer` of their metadata."""

    def __init__(self, check: AnswerCheck | None) -> None:
        self._check = check
        self._num_checked = self._num_wrong = 0
        self._examples: list[str] = []

    def add(self, row: dict[str, Any], where: str) -> None:
        """Checks the answer of a supervised row without problems."""
        if self._check is None:
            return
        is_expected = self._check(row["messages"], row.get("metadata") or {})
        self._num_checked += is_expected is not None
        if is_expected is False:
            self._num_wrong += 1
            self._examples += [where] if len(self._examples) < _MAX_EXAMPLES else []

    def notes(self) -> list[str]:
        """Returns a note on the rows whose answer is not the expected one, or []."""
        if not self._num_wrong:
            return []
        note = (
            f"{self._num_wrong} of {self._num_checked} answers do not match their expected_answer "
            f"({', '.join(self._examples)}{', …' if self._num_wrong > len(self._examples) else ''})"
            ": if they are wrong, leave these rows out before training"
        )
        return [note]


def validate_dataset(
    workspace: Workspace,
    request: ValidateDataset,
    *,
    imported: ImportedRows | None = None,
    answer_check: AnswerCheck | None = None,
) -> DatasetValidation:
    """Checks every row of a file, and returns the problems and statistics.

    `answer_check` is applied to supervised rows. The report lists the first `max_problems`
    problems. If a page is requested, all of them are written to a file next to the page. Raises
    DataError if the file is empty or none of its rows has a known format.
    """
    path = workspace.existing(request.path, label="path")
    row_format = RowFormat.ROLLOUTS if imported else _format_of(path, request.format)
    page = _page_path(workspace, path, request.report)
    problems_path = page.with_suffix(".problems.jsonl") if page else None
    if page and problems_path:
        check_page(page, overwrite=request.overwrite)
        _check_problems_path(problems_path, overwrite=request.overwrite)
    statistics = DatasetStatistics(row_format, request.category_field)
    totals = _Totals(request.max_problems)
    answers = _ExpectedAnswers(answer_check if row_format is RowFormat.SFT else None)
    with atomic_output(problems_path) if problems_path else nullcontext() as writer:
        for row in _rows(path) if imported is None else _imported_rows(imported):
            problems = _problems(row.value, row_format)
            unread = _unread_keys(row.value, row_format)
            totals.add(row, [p for p in problems if p not in unread], unread, writer)
            if isinstance(row.value, dict) and not problems and not unread:
                statistics.add(row.value, row.position, row.row_hash)
                answers.add(row.value, row.where)
        totals.list_unread_keys(writer)
    if problems_path is not None and not totals.num_problems:
        problems_path.unlink()
    report = ValidationReport(
        path=workspace.shown(path),
        format=row_format,
        rows=totals.rows,
        good=totals.rows - totals.bad,
        bad=totals.bad,
        num_problems=totals.num_problems,
        problems=totals.listed,
        duplicates=statistics.duplicates,
        copies=statistics.copies,
        size_bytes=totals.size_bytes,
        messages=statistics.messages.quantiles(),
        turns=statistics.turns.quantiles(),
        characters=statistics.characters.quantiles(),
        rewards=statistics.rewards.quantiles(),
        categories=dict(statistics.categories.most_common(50)),
        layouts=dict(sorted((imported.formats if imported else statistics.layouts).items())),
        failed=statistics.failed,
        success_unknown=statistics.success_unknown,
        notes=[
            *_category_notes(request, statistics),
            *answers.notes(),
            *tools_notes(statistics.without_tools, statistics.num_rows),
            *later_system_notes(statistics.later_system, statistics.num_rows),
        ],
        report=workspace.shown(page) if page else None,
        problems_file=workspace.shown(problems_path)
        if problems_path and totals.num_problems
        else None,
    )
    return DatasetValidation(report, statistics, row_format, page)


def _category_notes(request: ValidateDataset, statistics: DatasetStatistics) -> list[str]:
    """Returns a note if no row has the metadata field that the request names, or []."""
    field = request.category_field
    is_default = field == ValidateDataset.model_fields["category_field"].default
    if is_default or statistics.categories or not statistics.num_rows:
        return []
    return [missing_field_note(field, statistics.fields)]


def _check_problems_path(problems_path: Path, *, overwrite: bool) -> None:
    """Raises InputError if a file at this path is not a list of problems."""
    if overwrite or not problems_path.exists():
        return
    for line in itertools.islice(read_lines(problems_path), 1):
        try:
            msgspec.json.decode(line.data, type=RowProblem)
        except msgspec.DecodeError as error:
            raise foreign_file_error(problems_path) from error


def _page_path(workspace: Workspace, path: Path, requested: str) -> Path | None:
    """Returns the path of the page; `auto` means next to the data if it is in the workspace."""
    if requested == NONE:
        return None
    if requested != AUTO:
        return workspace.output_file(requested, label="report")
    is_inside = path.resolve().is_relative_to(workspace.root.resolve())
    folder = path.resolve().parent if is_inside and path != workspace.root else workspace.root
    return workspace.output_file(folder / "reports" / f"{path.name or 'data'}.html", label="report")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row with its position; `value` is a problem if the line is not a JSON object."""

    where: str
    position: RowPosition
    value: dict[str, Any] | Problem
    row_hash: int
    """A 64-bit hash of the row's bytes."""


class _Totals:
    """Counts rows and problems, lists the first problems and writes all of them to a file."""

    def __init__(self, max_listed: int) -> None:
        self._max_listed = max_listed
        self.rows = self.bad = self.num_problems = self.size_bytes = 0
        self.listed: list[RowProblem] = []
        self._unread: dict[str, tuple[str, Problem]] = {}
        self._num_unread = Counter[str]()

    def add(
        self, row: _Row, problems: list[Problem], unread: list[Problem], writer: LineWriter | None
    ) -> None:
        """Adds a row with its problems; those of unread keys are collected until the end."""
        self.rows += 1
        self.size_bytes += row.position.num_bytes
        self.bad += bool(problems or unread)
        for problem in unread:
            self._unread.setdefault(problem.field, (row.where, problem))
            self._num_unread[problem.field] += 1
        self.num_problems += len(problems)
        for problem in problems:
            located = _row_problem(problem, row.where)
            if len(self.listed) < self._max_listed:
                self.listed.append(located)
            if writer is not None:
                writer.write(located)

    def list_unread_keys(self, writer: LineWriter | None) -> None:
        """Lists each unread key as one problem, before all others, with its number of rows."""
        unread: list[RowProblem] = []
        for key, (where, problem) in sorted(self._unread.items()):
            message = f"{problem.message} ({self._num_unread[key]} of {self.rows} rows have it)"
            unread.append(_row_problem(Problem(key, message, problem.fix), where))
        self.num_problems += len(unread)
        self.listed = [*unread, *self.listed][: self._max_listed]
        if writer is not None:
            for located in unread:
                writer.write(located)


def _unread_keys(value: dict[str, Any] | Problem, row_format: RowFormat) -> list[Problem]:
    is_prompt = row_format is RowFormat.PROMPTS and isinstance(value, dict)
    return list(unread_key_problems(cast("dict[str, Any]", value))) if is_prompt else []


def _problems(value: dict[str, Any] | Problem, row_format: RowFormat) -> list[Problem]:
    return [value] if isinstance(value, Problem) else list(CHECKS[row_format](value))


def _rows(path: Path) -> Iterator[_Row]:
    for file in rollout_files(path):
        decode = decode_text_line if file.suffix == ".txt" else decode_line
        for line in read_row_lines(file):
            position = RowPosition(str(file), line.offset, line.num_bytes)
            hash_of_row = int(row_hash(line.view), 16)
            yield _Row(f"{file}:{line.number}", position, decode(line), hash_of_row)


def _imported_rows(imported: ImportedRows) -> Iterator[_Row]:
    yield from _rows(imported.path)
    fix = "remove it if it is not a conversation; `stillroom docs traces` lists readable formats"
    for where, reason in imported.refused:
        yield _Row(where, RowPosition("", 0, 0), Problem("", reason, fix), 0)


def _format_of(path: Path, requested: str) -> RowFormat:
    """Returns the requested format, else that of the first row of a known format.

    Raises DataError if the file has no rows, or none of a known format.
    """
    is_empty = True
    for row in _rows(path):
        is_empty = False
        if requested != AUTO:
            return RowFormat(requested)
        detected = detect_format(row.value) if isinstance(row.value, dict) else None
        if detected is not None:
            return detected
    if is_empty:
        raise DataError(f"{path} has no rows", "write one JSON object per line")
    raise DataError(
        f"no row of {path} is a prompt, a rollout, an SFT row or a preference pair",
        "set `format` to the intended format (prompts, rollouts, sft or dpo) to see each row's "
        "problems",
    )


def _row_problem(problem: Problem, where: str) -> RowProblem:
    """Returns a problem with its location; an unusual key is quoted in the message only."""
    field, message = problem.field, problem.message
    if not fences.is_name(field):
        # A key of a row may be a sentence that is meant as an instruction to an agent.
        field, message = fences.safe_name(field), f"{field}: {message}"
    return RowProblem(where=where, field=field, problem=message, fix=problem.fix)

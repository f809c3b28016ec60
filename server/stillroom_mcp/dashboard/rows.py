"""The rows of a data file: a list of them, one in full, and their counts and charts."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeGuard

from stillroom.data.chat.template import plain_text
from stillroom.data.checks import Problem, as_number, decode_row, decode_text_row
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.statistics import DatasetStatistics, RowPosition
from stillroom.errors import DataError, ModelError
from stillroom.report.data_pages import CategoryShare, category_shares, dataset_charts
from stillroom.report.drawing import BarChart
from stillroom.report.wording import Figure, count, duration, number, plural
from stillroom.types import dollars
from stillroom_mcp.dashboard.row_files import MAX_SHOWN_BYTES, FileLine, RowFiles, head_of

PAGE_ROWS = 50
_MAX_SEARCHED_BYTES = 48 << 20
"""The maximum number of bytes that one search reads, which takes less than a second."""
_LONGEST_TITLE = 160

OutcomeFilter = Literal["all", "right", "wrong", "failed"]
OUTCOME_FILTERS: tuple[OutcomeFilter, ...] = ("all", "right", "wrong", "failed")


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row in a list: its place in the file, its outcome, and the beginning of its text."""

    number: int
    offset: int
    format: str
    title: str
    outcome: Literal["right", "wrong", "failed", ""]
    remarks: list[str]


@dataclass(frozen=True, slots=True)
class RowsPage:
    """Some rows of a file, and where the pages before and after them begin."""

    rows: list[RowSummary]
    first: int
    total: int
    before: int | None
    after: int | None
    is_search: bool
    reached: int
    """The number of the last line that was read."""


def rows_page(
    files: RowFiles, path: Path, first: int, *, show: OutcomeFilter, query: str
) -> RowsPage:
    """Returns a page of a file's rows, beginning at line `first` (counted from 0).

    A search returns the rows that have the given outcome and contain the text. It stops after some
    megabytes; `reached` is the last line that it read.
    """
    total = files.count_lines(path)
    first = max(0, min(first, total - 1))
    if show == "all" and not query:
        rows = [summarize_row(row, path.suffix) for row in files.read(path, first, PAGE_ROWS)]
        end = first + PAGE_ROWS
        before = max(0, first - PAGE_ROWS) if first else None
        return RowsPage(
            rows, first, total, before, end if end < total else None, False, min(end, total)
        )
    rows, reached = list[RowSummary](), first
    for row in _lines_to_search(files, path, first):
        reached = row.number
        # Searching the raw bytes first avoids decoding most rows.
        if query and query.casefold() not in row.data.decode(errors="replace").casefold():
            continue
        row_summary = summarize_row(row, path.suffix)
        if show in ("all", row_summary.outcome):
            rows.append(row_summary)
            if len(rows) == PAGE_ROWS:
                break
    after = reached if reached < total else None
    return RowsPage(rows, first, total, 0 if first else None, after, True, reached)


def _lines_to_search(files: RowFiles, path: Path, first: int) -> Iterator[FileLine]:
    """Yields the lines of a file from line `first` (counted from 0), up to a number of bytes."""
    num_bytes = 0
    while num_bytes < _MAX_SEARCHED_BYTES:
        rows = files.read(path, first, 1000)
        for row in rows:
            num_bytes += len(row.data)
            yield row
            if num_bytes >= _MAX_SEARCHED_BYTES:
                return
        if len(rows) < 1000:
            return
        first += 1000


def parse_row(data: bytes, suffix: str) -> tuple[RowFormat, dict[str, Any]] | str:
    """Returns a row and its format (rollouts in stillroom's layout), or the problem with it."""
    row = decode_text_row(data) if suffix == ".txt" else decode_row(data)
    if isinstance(row, Problem):
        return f"the line {row.message}"
    row_format = detect_format(row)
    if row_format is None:
        return "the row has no known format"
    problem = next(iter(CHECKS[row_format](row)), None)
    if problem is not None:
        return f"{problem.field} {problem.message}"
    return row_format, as_rollout(row) if row_format is RowFormat.ROLLOUTS else row


def summarize_row(line: FileLine, suffix: str) -> RowSummary:
    """Returns the summary of a line for a list."""
    if line.is_cut:
        title = f"longer than {MAX_SHOWN_BYTES >> 20} MB: {head_of(line.data)[:_LONGEST_TITLE]}…"
        return RowSummary(line.number, line.offset, "unknown", title, "", [])
    row_or_problem = parse_row(line.data, suffix)
    if isinstance(row_or_problem, str):
        return RowSummary(line.number, line.offset, "unknown", row_or_problem, "", [])
    row_format, row = row_or_problem
    remarks: list[str] = []
    if (reward := as_number(row.get("reward"))) is not None:
        remarks.append(f"reward {number(reward)}")
    if row_format is RowFormat.ROLLOUTS:
        remarks += _rollout_remarks(row)
    return RowSummary(
        line.number, line.offset, row_format, _title(row_format, row), _outcome(row), remarks
    )


def _rollout_remarks(row: dict[str, Any]) -> Iterator[str]:
    turns = row.get("turns")
    if isinstance(turns, int) and turns:
        yield plural(turns, "turn")
    errors = row.get("tool_errors")
    if isinstance(errors, int) and errors:
        yield plural(errors, "tool error")
    stop = row.get("stop_reason")
    if isinstance(stop, str) and stop != "answered":
        yield stop
    if row.get("truncated") is True:
        yield "cut off"


def _outcome(row: dict[str, Any]) -> Literal["right", "wrong", "failed", ""]:
    if row.get("error") is not None:
        return "failed"
    success = row.get("success")
    return "" if not isinstance(success, bool) else "right" if success else "wrong"


def _title(row_format: RowFormat, row: dict[str, Any]) -> str:
    """Returns the beginning of the first user message."""
    try:
        messages: list[Any] = (
            list(task_from_row(row).messages)
            if row_format is RowFormat.PROMPTS
            else row["prompt" if row_format is RowFormat.DPO else "messages"]
        )
        users = (plain_text(message) for message in messages if message.get("role") == "user")
        text = " ".join(next(users, "").split())
    except (DataError, ModelError) as error:
        return error.problem
    return text if len(text) <= _LONGEST_TITLE else text[:_LONGEST_TITLE] + "…"


def row_figures(data: bytes, suffix: str) -> list[Figure]:
    """Returns the figures of one row: reward, tokens, cost and duration."""
    row_or_problem = parse_row(data, suffix)
    if isinstance(row_or_problem, str):
        return []
    _, row = row_or_problem
    return [*_rewards(row), *_usage(row)]


def _rewards(row: dict[str, Any]) -> Iterator[Figure]:
    if (reward := as_number(row.get("reward"))) is not None:
        rewards = row.get("rewards")
        by_name: dict[str, Any] = rewards if isinstance(rewards, dict) else {}
        parts = [f"{name} {number(value)}" for name, value in by_name.items() if _is_number(value)]
        yield Figure("Reward", number(reward), ", ".join(parts) or "total")


def _usage(row: dict[str, Any]) -> Iterator[Figure]:
    usage = row.get("usage")
    if isinstance(usage, dict):
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(completion, int):
            yield Figure("Tokens", count(completion), f"generated; {count(prompt)} read")
    cost = row.get("cost_usd")
    if _is_number(cost) and cost:
        yield Figure("Cost", dollars(cost), "of the calls")
    seconds = row.get("duration_s")
    if _is_number(seconds):
        yield Figure("Took", duration(seconds), str(row.get("stop_reason") or "answered"))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_MAX_SAMPLED_ROWS = 2000
_CHUNK_ROWS = 20
"""The number of consecutive rows in each chunk of the sample."""
_MAX_CACHED = 32


@dataclass(frozen=True, slots=True)
class FileSummary:
    """The counts and charts of a file's rows."""

    format: str
    num_rows: int
    num_sampled: int
    num_counted: int
    outcomes: Sequence[tuple[str, int]]
    charts: Sequence[BarChart]
    categories: Sequence[CategoryShare]


class FileSummaries:
    """The summaries of files, each cached until its file changes."""

    def __init__(self, files: RowFiles) -> None:
        self._files = files
        self._cache: OrderedDict[tuple[Path, int, int], FileSummary] = OrderedDict()
        self._lock = Lock()

    def summary_of(self, path: Path) -> FileSummary:
        """Returns the counts and charts of a file, from at most two thousand rows."""
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = _summarize_rows(self._files, path)
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
            return self._cache[key]


def _summarize_rows(files: RowFiles, path: Path) -> FileSummary:
    """Returns counts and charts of a file's rows; of a longer file, only of evenly spaced chunks.

    Rows in another format than the first valid row are not counted.
    """
    total = files.count_lines(path)
    num_chunks = max(1, _MAX_SAMPLED_ROWS // _CHUNK_ROWS)
    reads_all = total <= _MAX_SAMPLED_ROWS
    starts = [0] if reads_all else [chunk * total // num_chunks for chunk in range(num_chunks)]
    row_format: RowFormat | None = None
    statistics: DatasetStatistics | None = None
    outcomes = {"right": 0, "wrong": 0, "not judged": 0}
    num_sampled = num_counted = 0
    for start in starts:
        for line in files.read(path, start, total if reads_all else _CHUNK_ROWS):
            num_sampled += 1
            row_or_problem = "too long" if line.is_cut else parse_row(line.data, path.suffix)
            if isinstance(row_or_problem, str) or (row_format not in (None, row_or_problem[0])):
                continue
            row_format, row = row_or_problem
            statistics = statistics or DatasetStatistics(row_format, "task_type")
            num_counted += 1
            statistics.add(row, RowPosition("", line.offset, len(line.data)), line.offset)
            success = row.get("success")
            outcome = "right" if success is True else "wrong"
            outcomes[outcome if isinstance(success, bool) else "not judged"] += 1
    is_rollouts = row_format is RowFormat.ROLLOUTS
    return FileSummary(
        format=row_format or "unknown",
        num_rows=total,
        num_sampled=num_sampled,
        num_counted=num_counted,
        outcomes=list(outcomes.items()) if is_rollouts else (),
        charts=list(dataset_charts(row_format, statistics)) if statistics and row_format else (),
        categories=category_shares(statistics) if statistics else (),
    )

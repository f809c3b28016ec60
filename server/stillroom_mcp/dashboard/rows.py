"""Pages of the rows of a file: each row in a line, one in full, and their distributions."""

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
from stillroom.data.statistics import DatasetStatistics, RowPlace
from stillroom.errors import DataError, ModelError
from stillroom.report.data_pages import CategoryShare, category_shares, dataset_charts
from stillroom.report.drawing import BarChart
from stillroom.report.wording import Figure, count, number, plural, span
from stillroom_mcp.dashboard.row_files import MAX_SHOWN_BYTES, RowAt, RowFiles, head_of

PAGE_ROWS = 50
_MOST_SEARCHED = 48 << 20
"""The most bytes that one search looks through, which take less than a second."""
_LONGEST_TITLE = 160

Show = Literal["all", "right", "wrong", "failed"]
SHOWN: tuple[Show, ...] = ("all", "right", "wrong", "failed")


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row in a list: where it is, how it ended, and the beginning of what it says."""

    number: int
    offset: int
    format: str
    title: str
    outcome: Literal["right", "wrong", "failed", ""]
    remarks: list[str]


@dataclass(frozen=True, slots=True)
class RowsPage:
    """Some rows of a file, and which ones come before and after them."""

    rows: list[RowSummary]
    first: int
    total: int
    before: int | None
    after: int | None
    is_search: bool
    reached: int
    """The number of the last line that was looked at."""


def rows_page(files: RowFiles, path: Path, first: int, *, show: Show, query: str) -> RowsPage:
    """Returns a page of a file's rows from the line `first` on (the first is 0).

    A search returns the rows with the wanted outcome that hold the text, and goes no further than
    some megabytes; `reached` says how far that was.
    """
    total = files.count(path)
    first = max(0, min(first, total - 1))
    if show == "all" and not query:
        rows = [summary(row, path.suffix) for row in files.read(path, first, PAGE_ROWS)]
        end = first + PAGE_ROWS
        before = max(0, first - PAGE_ROWS) if first else None
        return RowsPage(
            rows, first, total, before, end if end < total else None, False, min(end, total)
        )
    rows, reached = list[RowSummary](), first
    for row in _searched(files, path, first):
        reached = row.number
        # The text is looked for in the row's bytes first, which is cheap.
        if query and query.casefold() not in row.data.decode(errors="replace").casefold():
            continue
        one = summary(row, path.suffix)
        if show in ("all", one.outcome):
            rows.append(one)
            if len(rows) == PAGE_ROWS:
                break
    after = reached if reached < total else None
    return RowsPage(rows, first, total, 0 if first else None, after, True, reached)


def _searched(files: RowFiles, path: Path, first: int) -> Iterator[RowAt]:
    num_bytes = 0
    while num_bytes < _MOST_SEARCHED:
        rows = files.read(path, first, 1000)
        for row in rows:
            num_bytes += len(row.data)
            yield row
            if num_bytes >= _MOST_SEARCHED:
                return
        if len(rows) < 1000:
            return
        first += 1000


def decoded(data: bytes, suffix: str) -> tuple[RowFormat, dict[str, Any]] | str:
    """Returns a row and its format, in our layout if it is a rollout; or what is wrong with it."""
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


def summary(line: RowAt, suffix: str) -> RowSummary:
    """Returns what a line of a file is, for a list."""
    if line.is_cut:
        title = f"longer than {MAX_SHOWN_BYTES >> 20} MB: {head_of(line.data)[:_LONGEST_TITLE]}…"
        return RowSummary(line.number, line.offset, "unknown", title, "", [])
    found = decoded(line.data, suffix)
    if isinstance(found, str):
        return RowSummary(line.number, line.offset, "unknown", found, "", [])
    row_format, row = found
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
    """Returns the beginning of what the user says first."""
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
    """Returns what is known of one row besides its conversation."""
    found = decoded(data, suffix)
    if isinstance(found, str):
        return []
    _, row = found
    return [*_rewards(row), *_usage(row)]


def _rewards(row: dict[str, Any]) -> Iterator[Figure]:
    if (reward := as_number(row.get("reward"))) is not None:
        rewards = row.get("rewards")
        single: dict[str, Any] = rewards if isinstance(rewards, dict) else {}
        parts = [f"{name} {number(value)}" for name, value in single.items() if _is_number(value)]
        yield Figure("Reward", number(reward), ", ".join(parts) or "in all")


def _usage(row: dict[str, Any]) -> Iterator[Figure]:
    usage = row.get("usage")
    if isinstance(usage, dict):
        sent, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(sent, int) and isinstance(written, int):
            yield Figure("Tokens", count(written), f"written, after {count(sent)} read")
    cost = row.get("cost_usd")
    if _is_number(cost) and cost:
        yield Figure("Cost", f"${cost:.4f}", "of the calls")
    seconds = row.get("duration_s")
    if _is_number(seconds):
        yield Figure("Took", span(seconds), str(row.get("stop_reason") or "answered"))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_MOST_ROWS = 2000
_STRETCH = 20
"""The number of neighbouring rows that are read at each place."""
_MOST_KEPT = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """The distributions of a file's rows."""

    format: str
    num_rows: int
    num_sampled: int
    num_good: int
    outcomes: Sequence[tuple[str, int]]
    charts: Sequence[BarChart]
    categories: Sequence[CategoryShare]


class Samples:
    """The distributions of files, each kept until its file changes."""

    def __init__(self, files: RowFiles) -> None:
        self._files = files
        self._kept: OrderedDict[tuple[Path, int, int], Sample] = OrderedDict()
        self._lock = Lock()

    def sample(self, path: Path) -> Sample:
        """Returns the distributions of a file, from at most two thousand of its rows."""
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = _read_sample(self._files, path)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]


def _read_sample(files: RowFiles, path: Path) -> Sample:
    total = files.count(path)
    num_places = max(1, _MOST_ROWS // _STRETCH)
    is_whole = total <= _MOST_ROWS
    starts = [0] if is_whole else [place * total // num_places for place in range(num_places)]
    row_format: RowFormat | None = None
    statistics: DatasetStatistics | None = None
    outcomes = {"right": 0, "wrong": 0, "not judged": 0}
    sampled = good = 0
    for start in starts:
        for line in files.read(path, start, total if is_whole else _STRETCH):
            sampled += 1
            found = "too long" if line.is_cut else decoded(line.data, path.suffix)
            if isinstance(found, str) or (row_format not in (None, found[0])):
                continue
            row_format, row = found
            statistics = statistics or DatasetStatistics(row_format, "task_type")
            good += 1
            statistics.add(row, RowPlace("", line.offset, len(line.data)), line.offset)
            success = row.get("success")
            known = {True: "right", False: "wrong"}
            outcomes[known[success] if isinstance(success, bool) else "not judged"] += 1
    is_rollouts = row_format is RowFormat.ROLLOUTS
    return Sample(
        format=row_format or "unknown",
        num_rows=total,
        num_sampled=sampled,
        num_good=good,
        outcomes=list(outcomes.items()) if is_rollouts else (),
        charts=list(dataset_charts(row_format, statistics)) if statistics and row_format else (),
        categories=category_shares(statistics) if statistics else (),
    )

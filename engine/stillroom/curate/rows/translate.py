"""Rows of other systems in our layout."""

from collections.abc import Iterator
from typing import Any

import msgspec

from stillroom.data.checks import Problem, decode_row
from stillroom.data.layouts.detect import RULES, RolloutLayout, layout_of, own_problems
from stillroom.data.layouts.foreign import ORIGIN
from stillroom.data.row_files import decode_line
from stillroom.errors import DataError
from stillroom.lines import Line


def in_our_layout(line: Line) -> tuple[RolloutLayout, bytes]:
    """Returns whose row it is, and the row in our layout. Raises DataError if it has a problem."""
    row = decode_line(line)
    if isinstance(row, Problem):
        raise DataError(f"the line {row.message}", row.fix)
    layout = layout_of(row)
    if layout is None:
        raise DataError(
            "the line is a rollout of no known layout",
            "give rollouts of stillroom, rnow or NeMo Gym; validate_dataset says what a file holds",
        )
    if layout is RolloutLayout.STILLROOM:
        _raise_first(_own_problems(row))
        return layout, line.data
    _raise_first(RULES[layout].problems(row))
    return layout, _translated(row, layout)


def _own_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields what is wrong with a rollout of ours, but for what curation can do without."""
    for problem in own_problems(row):
        is_absent = problem.field in ("id", "task_id") and row.get(problem.field) is None
        if not is_absent and not (problem.field == "messages" and row.get("messages") == []):
            yield problem


def _raise_first(problems: Iterator[Problem]) -> None:
    for problem in problems:
        raise DataError(f"{problem.field} {problem.message}".strip(), problem.fix)


def _translated(row: dict[str, Any], layout: RolloutLayout) -> bytes:
    own = RULES[layout].read(row)
    # Curation needs no way back, and with it every row would be twice as long.
    return msgspec.json.encode({key: own[key] for key in own if key != ORIGIN})


def own_row(data: bytes) -> bytes | None:
    """Returns a row that another system wrote in our layout; None of what none did.

    Raises DataError for a row of theirs that has a problem.
    """
    row = decode_row(data)
    layout = None if isinstance(row, Problem) else layout_of(row)
    if isinstance(row, Problem) or layout is None or layout is RolloutLayout.STILLROOM:
        return None
    _raise_first(RULES[layout].problems(row))
    return _translated(row, layout)

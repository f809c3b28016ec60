"""Detects the layout of a rollout row, and converts the row to Stillroom's layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stillroom.data.checks import (
    Problem,
    describe,
    message_problems,
    number_problems,
    object_problems,
    tool_schema_problems,
)
from stillroom.data.layouts.nemo_gym import (
    is_nemo_gym_rollout,
    nemo_gym_problems,
    rollout_from_nemo_gym,
)
from stillroom.data.layouts.rnow import is_rnow, rnow_problems, rollout_from_rnow

Row = dict[str, Any]


class RolloutLayout(StrEnum):
    """The system whose layout a rollout row has."""

    STILLROOM = "stillroom"
    RNOW = "rnow"
    NEMO_GYM = "nemo_gym"


@dataclass(frozen=True, slots=True)
class _LayoutRules:
    """The functions that check the rows of a layout and convert them to Stillroom's layout."""

    problems: Callable[[Row], Iterator[Problem]]
    to_stillroom: Callable[[Row], Row]


def layout_of(row: Row) -> RolloutLayout | None:
    """Returns the layout of a rollout row; None if the row is not a rollout."""
    if "stop_reason" in row and ("task_id" in row or "messages" in row):
        return RolloutLayout.STILLROOM
    if is_rnow(row):
        return RolloutLayout.RNOW
    return RolloutLayout.NEMO_GYM if is_nemo_gym_rollout(row) else None


def stillroom_problems(row: Row) -> Iterator[Problem]:
    """Yields every problem of a rollout row in Stillroom's layout."""
    yield from message_problems(row.get("messages"))
    yield from tool_schema_problems(row.get("tools"))
    yield from number_problems(row, "reward")
    yield from object_problems(row, "metadata")
    if not isinstance(row.get("success"), bool | None):
        value = describe(row["success"])
        yield Problem("success", f"must be true, false or null, not {value}", "write one of them")
    errors = row.get("tool_errors")
    if errors is not None and (isinstance(errors, bool) or not isinstance(errors, int)):
        value = describe(errors)
        fix = "write the number of tool calls that failed"
        yield Problem("tool_errors", f"must be a whole number, not {value}", fix)
    for field in ("id", "task_id", "stop_reason"):
        if not isinstance(row.get(field), str):
            value = describe(row.get(field))
            yield Problem(field, f"must be a string, not {value}", "write a string")


RULES = {
    RolloutLayout.STILLROOM: _LayoutRules(stillroom_problems, lambda row: row),
    RolloutLayout.RNOW: _LayoutRules(rnow_problems, rollout_from_rnow),
    RolloutLayout.NEMO_GYM: _LayoutRules(nemo_gym_problems, rollout_from_nemo_gym),
}


def rollout_problems(row: Row) -> Iterator[Problem]:
    """Yields every problem of a rollout row in any layout."""
    yield from RULES[layout_of(row) or RolloutLayout.STILLROOM].problems(row)


def as_rollout(row: Row) -> Row:
    """Converts a rollout row without problems from any layout to Stillroom's."""
    return RULES[layout_of(row) or RolloutLayout.STILLROOM].to_stillroom(row)

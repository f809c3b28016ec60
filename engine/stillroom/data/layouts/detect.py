"""In which layout a rollout row is written: ours, rnow's, or NeMo Gym's; each becomes ours."""

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
    nemo_gym_from_rollout,
    nemo_gym_problems,
    rollout_from_nemo_gym,
)
from stillroom.data.layouts.rnow import is_rnow, rnow_from_rollout, rnow_problems, rollout_from_rnow

Row = dict[str, Any]


class RolloutLayout(StrEnum):
    """Who writes rollouts so."""

    STILLROOM = "stillroom"
    RNOW = "rnow"
    NEMO_GYM = "nemo_gym"


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """What is wrong with a row of a layout, and the ways to our row and back."""

    problems: Callable[[Row], Iterator[Problem]]
    read: Callable[[Row], Row]
    write: Callable[[Row], Row]


def layout_of(row: Row) -> RolloutLayout | None:
    """Returns the layout of a rollout row; None where it is no rollout of any."""
    if "stop_reason" in row and ("task_id" in row or "messages" in row):
        return RolloutLayout.STILLROOM
    if is_rnow(row):
        return RolloutLayout.RNOW
    return RolloutLayout.NEMO_GYM if is_nemo_gym_rollout(row) else None


def own_problems(row: Row) -> Iterator[Problem]:
    """Yields everything wrong with a rollout row of ours."""
    yield from message_problems(row.get("messages"))
    yield from tool_schema_problems(row.get("tools"))
    yield from number_problems(row, "reward")
    yield from object_problems(row, "metadata")
    if not isinstance(row.get("success"), bool | None):
        given = describe(row["success"])
        yield Problem("success", f"must be true, false or null, not {given}", "write one of them")
    errors = row.get("tool_errors")
    if errors is not None and (isinstance(errors, bool) or not isinstance(errors, int)):
        given = describe(errors)
        yield Problem("tool_errors", f"must be a whole number, not {given}", "count the errors")
    for field in ("id", "task_id", "stop_reason"):
        if not isinstance(row.get(field), str):
            given = describe(row.get(field))
            yield Problem(field, f"must be a string, not {given}", "write the rollout again")


def _same(row: Row) -> Row:
    return row


RULES = {
    RolloutLayout.STILLROOM: LayoutRules(own_problems, _same, _same),
    RolloutLayout.RNOW: LayoutRules(rnow_problems, rollout_from_rnow, rnow_from_rollout),
    RolloutLayout.NEMO_GYM: LayoutRules(
        nemo_gym_problems, rollout_from_nemo_gym, nemo_gym_from_rollout
    ),
}


def rollout_problems(row: Row) -> Iterator[Problem]:
    """Yields everything wrong with a rollout row of any layout."""
    yield from RULES[layout_of(row) or RolloutLayout.STILLROOM].problems(row)


def as_rollout(row: Row) -> Row:
    """Returns our row of a rollout of any layout that has no problems."""
    return RULES[layout_of(row) or RolloutLayout.STILLROOM].read(row)

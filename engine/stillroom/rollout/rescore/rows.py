"""Reads the rows of a rollouts file for judging, and puts new rewards into them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.data.checks import Problem, as_number
from stillroom.data.formats import Task
from stillroom.data.layouts.detect import RULES, RolloutLayout, layout_of
from stillroom.data.layouts.foreign import as_object, prompt_length
from stillroom.data.row_files import (
    TOO_LONG,
    decode_line,
    read_row_lines,
    rollout_files,
)
from stillroom.errors import DataError, FailureClass
from stillroom.lines import Line
from stillroom.rollout.rewards.rewards import Judgement
from stillroom.types import Message

NOT_A_ROLLOUT = "not a rollout row"
FAILED = "ended by an infrastructure failure"
UNJUDGED = "nothing judges it"
_OF_REWARDS = (FailureClass.REWARD, FailureClass.REWARD_TIMEOUT)
_REWARD_NAME = {RolloutLayout.RNOW: "total_reward"}
_RAW_ROW: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
)


@dataclass(frozen=True, slots=True)
class JudgeableRow:
    """A rollout row that can be judged."""

    row: dict[str, Any]
    layout: RolloutLayout
    task: Task
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class InputRow:
    """A line of the input: its rollout, and the reason why its reward is kept if not judged."""

    where: str
    data: bytes
    rollout: JudgeableRow | None
    reason: str

    @property
    def key(self) -> str:
        """A hash of the row's bytes, which identifies the row."""
        return hashlib.sha256(self.data).hexdigest()[:32]


def input_rows(source: Path) -> Iterator[InputRow]:
    """Yields every row of a file or folder, including those that cannot be judged."""
    for file in rollout_files(source):
        for line in read_row_lines(file):
            where = f"{file}:{line.number}"
            if line.is_cut:
                # Every row must be copied to the output, but this one was too long to read whole.
                raise DataError(f"{where} {TOO_LONG}", "take that line out of the file")
            yield _input_row(where, line)


def _input_row(where: str, line: Line) -> InputRow:
    row, data = decode_line(line), line.data
    layout = None if isinstance(row, Problem) else layout_of(row)
    if isinstance(row, Problem) or layout is None or any(RULES[layout].problems(row)):
        return InputRow(where, data, None, NOT_A_ROLLOUT)
    fields = RULES[layout].read(row)
    error = fields.get("error")
    # A row whose reward alone failed is judged: scoring it again is the remedy.
    if error is not None and as_object(error).get("class") not in _OF_REWARDS:
        return InputRow(where, data, None, FAILED)
    messages = cast("list[Message]", fields["messages"])
    task = Task(
        task_id=str(fields.get("task_id") or fields.get("id")),
        messages=messages[: prompt_length(fields["messages"], fields.get("turns"))],
        metadata=fields.get("metadata") or {},
        tool_names=None,
        reward_names=None,
        variables=as_object(fields.get("variables")),
    )
    return InputRow(where, data, JudgeableRow(row, layout, task, messages), UNJUDGED)


def reward_of(rollout: JudgeableRow) -> float | None:
    """Returns the reward that a row has now, or None if it has none."""
    return as_number(rollout.row.get(_reward_name(rollout)))


def _reward_name(rollout: JudgeableRow) -> str:
    return _REWARD_NAME.get(rollout.layout, "reward")


def has_same_reward(rollout: JudgeableRow, judgement: Judgement) -> bool:
    """Returns whether a row already has the rewards of a judgement."""
    row = rollout.row
    return (
        reward_of(rollout) == judgement.total
        and row.get("rewards") == judgement.by_name
        and row.get("success") is judgement.success
    )


def with_rewards(row: InputRow, rollout: JudgeableRow, judgement: Judgement) -> bytes:
    """Returns the row's JSON with new rewards; every other value keeps its bytes."""
    fields = _RAW_ROW.decode(row.data)
    changed = {
        _reward_name(rollout): judgement.total,
        "rewards": judgement.by_name,
        "success": judgement.success,
    }
    for name, value in changed.items():
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)

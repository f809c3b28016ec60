"""Functions that the readers of other systems' rollout layouts share."""

from collections.abc import Sequence
from typing import Any, cast

from stillroom.data.chat.tool_calls import has_call_text
from stillroom.data.checks import as_number
from stillroom.files import content_hash
from stillroom.types import StopReason

Row = dict[str, Any]


def prompt_messages(messages: Sequence[Row]) -> list[Row]:
    """Returns the messages before the first assistant message; all if there is none."""
    roles = [message["role"] for message in messages]
    return list(messages[: roles.index("assistant")] if "assistant" in roles else messages)


def prompt_length(messages: Sequence[Row], turns: Any) -> int:
    """Returns the number of messages before the first of the last `turns` assistant turns.

    If `turns` is not a possible number, it returns the number before the first assistant turn.
    """
    sampled = [index for index, m in enumerate(messages) if m["role"] == "assistant"]
    if isinstance(turns, int) and 0 < turns <= len(sampled):
        return sampled[-turns]
    return sampled[0] if sampled else len(messages)


def task_id_of(row: Row, identity: Any) -> str:
    """Returns the row's task_id, or else a hash of the values that identify the task."""
    task_id = row.get("task_id")
    return task_id if isinstance(task_id, str) and task_id else content_hash(identity)


def infer_stop_reason(
    messages: Sequence[Row], *, is_failed: bool, is_truncated: bool
) -> StopReason:
    """Returns why a rollout ended, inferred from its messages and two flags.

    Text with a tool call that the model's server did not parse is not an answer.
    """
    if is_failed:
        return StopReason.ERROR
    if is_truncated:
        return StopReason.MAX_TOKENS
    last = messages[-1] if messages else {"role": "user"}
    text = last.get("content")
    is_call = bool(last.get("tool_calls")) or (isinstance(text, str) and has_call_text(text))
    is_answer = last["role"] == "assistant" and not is_call
    return StopReason.ANSWERED if is_answer else StopReason.MAX_TURNS


def as_object(value: Any) -> Row:
    """Returns the value if it is an object, else an empty object."""
    return cast("Row", value) if isinstance(value, dict) else {}


def numbers_by_name(value: Any) -> dict[str, float]:
    """Returns the entries of an object whose values are numbers."""
    named = as_object(value)
    return {name: number for name in named if (number := as_number(named[name])) is not None}


def count_or_zero(value: Any) -> int:
    """Returns the value if it is a positive whole number, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

"""Functions that the converters of other systems' rollout layouts share.

A foreign row becomes `{…our fields…, "origin": {"format": …, "row": the foreign row}}`. Our row
becomes a foreign row that holds, under "stillroom", all fields that the other layout lacks. So both
conversions can be undone exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from stillroom.data.checks import as_number, message_problems, tool_schema_problems
from stillroom.files import content_hash
from stillroom.types import StopReason

Row = dict[str, Any]
ORIGIN, REST = "origin", "stillroom"


def original(row: Row, layout: str) -> Row | None:
    """Returns the foreign row from which our row was read; None if it did not have this layout."""
    origin = as_object(row.get(ORIGIN))
    foreign = origin.get("row") if origin.get("format") == layout else None
    return cast("Row", foreign) if isinstance(foreign, dict) else None


def changes(row: Row, before: Row) -> Row:
    """Returns the fields of our row that were changed since it was read as `before`.

    A removed field has the value None.
    """
    removed = {key: None for key in before if key not in row}
    return removed | {key: value for key, value in row.items() if before.get(key, row) != value}


def restored(row: Row, messages: Callable[[], Any], write: Callable[[Row], Row]) -> Row | None:
    """Returns our row from which a foreign row was written, unless that was changed since.

    Returns None if it was changed, or was not written from one of our rows. `messages` reads the
    foreign row's messages, and `write` converts our row into the foreign layout.
    """
    rest = row.get(REST)
    if not isinstance(rest, dict):
        return None
    ours = dict(cast("Row", rest))
    if "messages" not in ours:
        ours["messages"] = messages()
    # The file may have been edited, so the row is checked like any other.
    if [*message_problems(ours["messages"]), *tool_schema_problems(ours.get("tools"))]:
        return None
    return ours if write(ours) == row else None


def leading(messages: Sequence[Row]) -> list[Row]:
    """Returns the messages before the first assistant message; all if there is none."""
    roles = [message["role"] for message in messages]
    return list(messages[: roles.index("assistant")] if "assistant" in roles else messages)


def prompt_length(messages: Sequence[Row], turns: Any) -> int:
    """Returns the number of messages in the prompt, if the last `turns` turns were sampled.

    If `turns` is not a possible number, all assistant turns count as sampled.
    """
    sampled = [index for index, m in enumerate(messages) if m["role"] == "assistant"]
    if isinstance(turns, int) and 0 < turns <= len(sampled):
        return sampled[-turns]
    return sampled[0] if sampled else len(messages)


def task_id_of(row: Row, identity: Any) -> str:
    """Returns the row's task_id, or else a hash of the values that identify its task."""
    task_id = row.get("task_id")
    return task_id if isinstance(task_id, str) and task_id else content_hash(identity)


def ending(messages: Sequence[Row], *, is_failed: bool, is_truncated: bool) -> StopReason:
    """Returns why a rollout ended, judged by its messages and these two flags."""
    last = messages[-1] if messages else {"role": "user"}
    is_open = last["role"] != "assistant" or bool(last.get("tool_calls"))
    return stop_reason(is_failed=is_failed, is_truncated=is_truncated, is_open=is_open)


def stop_reason(*, is_failed: bool, is_truncated: bool, is_open: bool) -> StopReason:
    """Returns why a rollout ended; `is_open` means that its last message is not an answer."""
    if is_failed:
        return StopReason.ERROR
    if is_truncated:
        return StopReason.MAX_TOKENS
    return StopReason.MAX_TURNS if is_open else StopReason.ANSWERED


def as_object(value: Any) -> Row:
    """Returns the value if it is an object, else an empty object."""
    return cast("Row", value) if isinstance(value, dict) else {}


def numbers_by_name(value: Any) -> dict[str, float]:
    """Returns the entries of an object whose values are numbers."""
    named = as_object(value)
    return {name: number for name in named if (number := as_number(named[name])) is not None}


def count(value: Any) -> int:
    """Returns a number of tokens; 0 for anything that is not a positive whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

"""Rollouts in rnow's layout: one JSON file each, with the messages under `conversation`.

Source: rnow 0.4, `rollouts/rollout_N/sample_M.json`; its `--store` writes all rollouts of a test as
one document after some lines of text, `rollouts/ID.txt`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from stillroom.data.checks import (
    Problem,
    as_number,
    describe,
    message_problems,
    number_problems,
    object_problems,
    tool_schema_problems,
)
from stillroom.data.layouts.foreign import (
    Row,
    as_object,
    count_or_zero,
    infer_stop_reason,
    numbers_by_name,
    prompt_messages,
    task_id_of,
)
from stillroom.errors import FailureClass

_FAILED_REWARDS = ("error", "timeout")


def is_rnow(row: Row) -> bool:
    """Returns whether a row has rnow's fields."""
    if "conversation" not in row:
        return row.get("completed") == "error" and failed_before_its_conversation(row)
    return any(name in row for name in ("completed", "total_reward", "success"))


def failed_before_its_conversation(row: Row) -> bool:
    """Returns whether an rnow rollout has an error in place of a conversation."""
    has_messages = row.get("conversation") or "messages" in row
    return not has_messages and row.get("success") is False and isinstance(row.get("error"), str)


STORED_FIELD = "results"
"""The field of a stored document that lists the rollouts."""


def is_stored_by_rnow(path: Path) -> bool:
    """Returns whether a file is one that `rnow test --store` wrote."""
    if path.suffix != ".txt":
        return False
    with path.open("rb") as stream:
        head = stream.read(4096)
    return head.startswith(b"Rollout ID: ") and b"\n--- Full Results ---\n" in head


def rnow_problems(row: Row) -> Iterator[Problem]:
    """Yields every problem of a rollout in rnow's layout."""
    if not failed_before_its_conversation(row):
        yield from message_problems(row.get("conversation"), "conversation")
    yield from number_problems(row, "total_reward")
    yield from object_problems(row, "metadata")
    yield from object_problems(row, "rewards")
    yield from tool_schema_problems(row.get("tools"))
    for name, value in as_object(row.get("rewards")).items():
        if value is not None and not is_rnow_reward(value):
            yield Problem(
                f"rewards.{name}",
                f"must be a number, 'error' or 'timeout', not {describe(value)}",
                "write the reward",
            )


def is_rnow_reward(value: Any) -> bool:
    """Returns whether a value is a number, or rnow's marker of a failed reward function."""
    return value in _FAILED_REWARDS or as_number(value) is not None


def rollout_from_rnow(row: Row) -> Row:
    """Converts an rnow rollout without problems to Stillroom's layout."""
    messages: list[Row] = row.get("conversation") or []
    failure = failure_of(row)
    is_truncated = row.get("truncated") is True
    # rnow writes a reward of 0 if a reward function failed, which says nothing about the answer.
    reward = None if failure else as_number(row.get("total_reward"))
    # A rollout that did not complete its task is not a success, even with an answer.
    success = row.get("success", False if is_incomplete(row) else None)
    if success is True:  # rnow writes true for all rollouts that ran; only a reward judges them.
        success = False if is_incomplete(row) and reward is None else None
    prompt_tokens = count_or_zero(row.get("promptTokens"))
    return {
        "id": row["id"] if isinstance(row.get("id"), str) else "",
        "task_id": task_id_of(row, {"messages": prompt_messages(messages)}),
        "sample": 0,
        "messages": messages,
        "tools": row.get("tools") or [],
        "metadata": row.get("metadata") or {},
        "reward": reward,
        "rewards": numbers_by_name(row.get("rewards")),
        "success": success if isinstance(success, bool) and not failure else None,
        "stop_reason": infer_stop_reason(
            messages, is_failed=bool(failure), is_truncated=is_truncated
        ),
        "turns": sum(message["role"] == "assistant" for message in messages),
        "truncated": is_truncated,
        "error": failure,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": max(0, count_or_zero(row.get("totalTokens")) - prompt_tokens),
        },
    }


def is_incomplete(row: Row) -> bool:
    """Returns whether an rnow rollout ended before its task was complete, without a failure."""
    return is_rnow(row) and row.get("completed") is False


def failure_of(row: Row) -> dict[str, str] | None:
    """Returns the infrastructure failure of an rnow rollout; None if there was none."""
    failed = [name for name, v in as_object(row.get("rewards")).items() if v in _FAILED_REWARDS]
    if failed:
        kind, message = FailureClass.REWARD, f"reward failed: {', '.join(failed)}"
    elif row.get("completed") == "error" or row.get("error"):
        kind, message = FailureClass.INTERNAL, str(row.get("error") or "the rollout failed")
    else:
        return None
    errors: Any = row.get("errors")
    texts = [str(error) for error in cast("list[Any]", errors)] if isinstance(errors, list) else []
    return {"class": kind.value, "message": "; ".join([message, *texts])[:500]}

"""Prompts and rollouts in NeMo Gym's layout: a Responses API request, its response, a reward.

Rows of NeMo Gym's offline tutorial have the response's items in a top-level field `output`.
"""

from collections.abc import Iterator
from typing import Any, cast

from stillroom.data.checks import (
    Problem,
    as_number,
    describe,
    message_problems,
    number_problems,
    object_problems,
)
from stillroom.data.layouts.foreign import (
    Row,
    as_object,
    count_or_zero,
    infer_stop_reason,
    numbers_by_name,
    task_id_of,
)
from stillroom.data.layouts.responses import (
    flat_tool_problems,
    item_problems,
    messages_from_items,
    schemas_from_flat,
)
from stillroom.errors import FailureClass

LAYOUT = "nemo_gym"
REQUEST = "responses_create_params"
_STILLROOM_FIELDS = frozenset(
    ("id", "task_id", "reward", "rewards", "success", "metadata", "response", "output", REQUEST)
)


def is_nemo_gym_rollout(row: Row) -> bool:
    """Returns whether a row is a NeMo Gym rollout, which unlike a prompt has a response."""
    has_items = isinstance(row.get("output"), list) and (REQUEST in row or "reward" in row)
    return "conversation" not in row and (has_items or (REQUEST in row and "response" in row))


def _request_problems(row: Row) -> Iterator[Problem]:
    """Yields every problem of the request of a prompt or rollout row."""
    request = row.get(REQUEST)
    if not isinstance(request, dict):
        yield Problem(REQUEST, f"must be an object, not {describe(request)}", "write an object")
        return
    request_input = cast("Row", request).get("input")
    where = f"{REQUEST}.input"
    if isinstance(request_input, str):
        if not request_input.strip():
            yield Problem(where, "is empty", "write the prompt's text")
    elif request_input == []:
        yield Problem(where, "is empty", "write the prompt's messages")
    else:
        yield from item_problems(request_input, where)
    yield from flat_tool_problems(cast("Row", request).get("tools"), f"{REQUEST}.tools")


def prompt_row_problems(row: Row) -> Iterator[Problem]:
    """Yields every problem of a prompt row."""
    problems = list(_request_problems(row))
    yield from problems
    if not problems:
        messages = request_messages(row)
        yield from message_problems(messages, f"{REQUEST}.input")
        if messages[-1]["role"] == "assistant":
            yield Problem(
                f"{REQUEST}.input",
                "ends with an assistant's turn, so nothing is left to answer",
                "end with the user's message",
            )


def request_messages(row: Row) -> list[Row]:
    """Returns the chat messages of a request without problems; its instructions come first."""
    request: Row = row[REQUEST]
    items = request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    instructions = request.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    return [*system, *messages_from_items(items)]


def request_schemas(row: Row) -> list[Row] | None:
    """Returns the tool schemas of a request in the chat form; None if it has none."""
    return schemas_from_flat(row[REQUEST].get("tools")) or None


def row_metadata(row: Row) -> Row:
    """Returns the row's metadata and the fields that Stillroom's layout does not have.

    A name in both has the value from the metadata.
    """
    extra = {key: value for key, value in row.items() if key not in _STILLROOM_FIELDS}
    return extra | as_object(row.get("metadata"))


def nemo_gym_problems(row: Row) -> Iterator[Problem]:
    """Yields every problem of a rollout row."""
    response: Any = row.get("response")
    problems = list(_request_problems(row)) if REQUEST in row else []
    if response is not None and not isinstance(response, dict):
        problems.append(_response_problem(response))
    else:
        where = "output" if _has_top_level_output(row) else "response.output"
        problems += item_problems(_output(row), where)
    yield from problems
    if not problems:
        yield from message_problems(_messages(row), "the conversation")
    yield from number_problems(row, "reward")
    yield from object_problems(row, "metadata")


def _response_problem(response: Any) -> Problem:
    return Problem(
        "response", f"must be an object, not {describe(response)}", 'write {"output": […]}'
    )


def _has_top_level_output(row: Row) -> bool:
    return not isinstance(row.get("response"), dict) or "output" not in row["response"]


def _output(row: Row) -> Any:
    return row.get("output") if _has_top_level_output(row) else row["response"]["output"]


def _messages(row: Row) -> list[Row]:
    prompt = request_messages(row) if REQUEST in row else []
    # Converted separately, so that the answer is not merged with the last turn of the prompt.
    return [*prompt, *messages_from_items(_output(row))]


def rollout_from_nemo_gym(row: Row) -> Row:
    """Converts a NeMo Gym rollout without problems to Stillroom's layout."""
    messages = _messages(row)
    prompt = request_messages(row) if REQUEST in row else []
    response: Row = row.get("response") or {}
    failure = _failure(row, response)
    is_truncated = bool(response.get("incomplete_details"))
    success = row.get("success")
    counts = as_object(response.get("usage"))
    task, sample = row.get("_ng_task_index"), row.get("_ng_rollout_index")
    model = response.get("model")
    teacher = {"teacher": {"provider": LAYOUT, "model": model, "settings": _settings(row)}}
    return (teacher if isinstance(model, str) and model else {}) | {
        "id": _rollout_id(row, response),
        # The hash includes the index, since the prompt is the same for all tasks in some
        # environments.
        "task_id": task_id_of(row, {"messages": prompt, "task": task}),
        "sample": count_or_zero(sample),
        "messages": messages,
        "tools": (request_schemas(row) if REQUEST in row else None) or [],
        "metadata": row_metadata(row),
        "reward": None if failure else as_number(row.get("reward")),
        "rewards": numbers_by_name(row.get("rewards")),
        "success": success if isinstance(success, bool) and not failure else None,
        "stop_reason": infer_stop_reason(
            messages, is_failed=bool(failure), is_truncated=is_truncated
        ),
        "turns": sum(m["role"] == "assistant" for m in messages[len(prompt) :]),
        "truncated": is_truncated,
        "error": failure,
        "usage": {
            "prompt_tokens": count_or_zero(counts.get("input_tokens")),
            "completion_tokens": count_or_zero(counts.get("output_tokens")),
        },
    }


def _settings(row: Row) -> Row:
    """Returns the sampling settings of a row's request, under Stillroom's names."""
    request = as_object(row.get(REQUEST))
    names = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"}
    return {
        name: request[request_name]
        for name, request_name in names.items()
        if request_name in request
    }


def _rollout_id(row: Row, response: Row) -> str:
    for candidate in (row.get("id"), response.get("id")):
        if isinstance(candidate, str) and candidate:
            return candidate
    return f"{row.get('_ng_task_index')}-{row.get('_ng_rollout_index')}"


def _failure(row: Row, response: Row) -> dict[str, str] | None:
    """Returns the infrastructure failure of a rollout; None if there was none."""
    error: Any = response.get("error") or row.get("error")
    if not error and response.get("status") != "failed":
        return None
    text = cast("Row", error).get("message") if isinstance(error, dict) else error
    return {"class": FailureClass.INTERNAL.value, "message": str(text or "the response failed")}

"""Checks of the fields of a row. Each check yields all problems, not only the first."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

# A name never begins with a dash, as `docker run` would take it for an option.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_JSON = msgspec.json.Decoder()
_Encoded = TypeVar("_Encoded")
_Decoded = TypeVar("_Decoded")
ROLES = ("system", "user", "assistant", "tool")
_RESPONSES_ITEMS = ("function_call", "function_call_output", "reasoning")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a row: the field, a description that follows its name, and the fix."""

    field: str
    message: str
    fix: str


def describe(value: Any) -> str:
    """Returns a value's JSON type and its shortened repr, for error messages."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    kind = kinds.get(type(value), "number" if isinstance(value, int | float) else "value")
    text = repr(value)
    return f"{kind} {text if len(text) <= 40 else text[:37] + '…'}"


def message_problems(messages: Any, field: str = "messages") -> Iterator[Problem]:
    """Yields every problem of a conversation in OpenAI's chat format."""
    if not isinstance(messages, list) or not messages:
        yield Problem(
            field,
            f"must be a non-empty list of messages, not {describe(messages)}",
            'write e.g. [{"role": "user", "content": "…"}]',
        )
        return
    call_ids: set[str] = set()
    for index, message in enumerate(cast("list[Any]", messages)):
        where = f"{field}[{index}]"
        if not isinstance(message, dict):
            yield Problem(
                where,
                f"must be an object, not {describe(message)}",
                'write {"role": "user", "content": "…"}',
            )
            continue
        yield from _message_problems(cast("dict[str, Any]", message), where, call_ids)


def _message_problems(message: dict[str, Any], where: str, call_ids: set[str]) -> Iterator[Problem]:
    role = message.get("role")
    if role is None and message.get("type") in _RESPONSES_ITEMS:
        yield Problem(
            where,
            f"is an item of the Responses API ({message['type']}), not a message",
            "run convert_rollouts on the original rollouts (it reads NeMo Gym's layout)",
        )
        return
    if role not in ROLES:
        yield Problem(
            f"{where}.role", f"role {role!r} is unknown", f"use one of {', '.join(ROLES)}"
        )
    yield from _content_problems(message, where)
    yield from _weight_problems(message, where)
    if role == "assistant" and message.get("tool_calls"):
        yield from _tool_call_problems(message["tool_calls"], f"{where}.tool_calls", call_ids)
    if role == "tool":
        call_id = message.get("tool_call_id")
        is_known = isinstance(call_id, str) and call_id in call_ids
        if call_id is not None and not is_known:
            yield Problem(
                f"{where}.tool_call_id",
                f"{call_id!r} answers no tool call of an earlier assistant message",
                "use the id of the call that it answers",
            )


def _weight_problems(message: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yields a problem if the message has a weight that training does not support."""
    weight = message.get("weight")
    if isinstance(weight, bool) or weight not in (None, 0, 1):
        fix = "write 1 (trained) or 0 (context only); to weight a row more, repeat the row"
        yield Problem(f"{where}.weight", f"must be 0 or 1, not {describe(weight)}", fix)
    elif weight == 1 and message.get("role") != "assistant":
        fix = "leave it out: only the assistant's messages are trained"
        yield Problem(f"{where}.weight", f"is 1 in a {message.get('role')} message", fix)


def _content_problems(message: dict[str, Any], where: str) -> Iterator[Problem]:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if message.get("role") == "assistant":
            return
        yield Problem(f"{where}.content", "is missing", "write the text of the message")
    elif isinstance(content, list):
        parts = cast("list[Any]", content)
        bad_parts = [part for part in parts if not (isinstance(part, dict) and "type" in part)]
        if bad_parts:
            yield Problem(
                f"{where}.content",
                f"has a part that is {describe(bad_parts[0])}",
                'write parts as {"type": "text", "text": "…"}',
            )
    else:
        yield Problem(
            f"{where}.content",
            f"must be a string or a list of parts, not {describe(content)}",
            "write the text of the message as a string",
        )


def _tool_call_problems(calls: Any, where: str, call_ids: set[str]) -> Iterator[Problem]:
    if not isinstance(calls, list):
        yield Problem(where, f"must be a list, not {describe(calls)}", "write a list of calls")
        return
    for index, call in enumerate(cast("list[Any]", calls)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield Problem(
                f"{where}[{index}]",
                f"must be an object with function.name, not {describe(call)}",
                'write {"id": "…", "type": "function", "function": {"name": …, "arguments": "…"}}',
            )
            continue
        if not isinstance(function.get("arguments"), str):
            yield Problem(
                f"{where}[{index}].function.arguments",
                f"must be a JSON string, not {describe(function.get('arguments'))}",
                'quote it, e.g. "{\\"item\\": \\"lamp\\"}"',
            )
        if isinstance(call.get("id"), str):
            call_ids.add(call["id"])


def tool_schema_problems(tools: Any, field: str = "tools") -> Iterator[Problem]:
    """Yields every problem of a list of tool schemas in OpenAI's function format."""
    if tools is None:
        return
    if not isinstance(tools, list):
        yield Problem(field, f"must be a list, not {describe(tools)}", "write a list of schemas")
        return
    for index, tool in enumerate(cast("list[Any]", tools)):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield Problem(
                f"{field}[{index}]",
                f"must be a tool schema, not {describe(tool)}",
                'write {"type": "function", "function": {"name": …, "parameters": {…}}}',
            )


def object_problems(row: dict[str, Any], field: str) -> Iterator[Problem]:
    """Yields a problem if an optional field is present and not an object."""
    value = row.get(field)
    if value is not None and not isinstance(value, dict):
        yield Problem(
            field, f"must be an object, not {describe(value)}", "write an object, or leave it out"
        )


def number_problems(row: dict[str, Any], field: str) -> Iterator[Problem]:
    """Yields a problem if an optional field is present and not a number."""
    value = row.get(field)
    if value is not None and as_number(value) is None:
        yield Problem(
            field, f"must be a number, not {describe(value)}", "write a number, or leave it out"
        )


def as_number(value: Any) -> float | None:
    """Returns a JSON number as a float; None for other values and for numbers too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def name_list_problems(row: dict[str, Any], field: str) -> Iterator[Problem]:
    """Yields a problem if an optional field is present and not a list of names."""
    value = row.get(field)
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(v, str) for v in cast("list[Any]", value)):
        yield Problem(
            field,
            f"must be a list of names, not {describe(value)}",
            'write e.g. ["price", "stock"]',
        )


def docker_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields every problem of a row's `docker` and `docker_env`."""
    image, env = row.get("docker"), row.get("docker_env")
    if image is not None and not (isinstance(image, str) and _IMAGE.fullmatch(image)):
        yield Problem(
            "docker",
            f"must be local/NAME or the name of an image, not {describe(image)}",
            'write e.g. "local/browser" (built from Dockerfile.browser) or "python:3.12-slim"',
        )
    if env is None:
        return
    names = cast("dict[str, Any]", env) if isinstance(env, dict) else None
    if names is None or not all(
        _ENV_NAME.fullmatch(name) and isinstance(value, str) and "\0" not in value
        for name, value in names.items()
    ):
        yield Problem(
            "docker_env",
            f"must be an object of variable names and strings, not {describe(env)}",
            'write e.g. {"MODE": "test"}',
        )
    elif names and not image:
        fix = "set docker to the image, or leave docker_env out"
        yield Problem("docker_env", "is set, but docker is not", fix)


def decode_row(data: bytes) -> dict[str, Any] | Problem:
    """Returns the JSON object of a line, or the problem of the line."""
    try:
        value = decode_with_spare_frames(_JSON.decode, data, 8)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Problem("", f"is not valid JSON: {error}", "write one JSON object per line")
    if not isinstance(value, dict):
        return Problem("", f"must be a JSON object, not {describe(value)}", "write {…} on the line")
    return cast("dict[str, Any]", value)


def decode_with_spare_frames(
    decode: Callable[[_Encoded], _Decoded], data: _Encoded, frames: int
) -> _Decoded:
    """Decodes data with `frames` extra calls on the stack.

    Decoders refuse values that are nested too deeply for the rest of the stack. A value that was
    decoded here can be encoded and decoded again wherever the stack is up to `frames` calls deeper
    than in the caller.
    """
    return decode_with_spare_frames(decode, data, frames - 1) if frames else decode(data)


def decode_text_row(data: bytes) -> dict[str, Any] | Problem:
    """Returns a line of a text file as a prompt row, or the problem of the line."""
    try:
        return {"prompt": data.decode("utf-8")}
    except UnicodeDecodeError as error:
        return Problem("", f"is not UTF-8 text: {error}", "save the file as UTF-8")

"""Brings messages in the shapes of chat APIs and datasets into ours, and names what is lost."""

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from stillroom.data.checks import describe
from stillroom.importing.json_rows import Row, UnreadableRowError

IMAGES_LOST = "images left out"
AUDIO_LOST = "audio left out"
FILES_LOST = "files left out"
PARTS_LOST = "content of an unknown kind left out"
REASONING_LOST = "reasoning is encrypted or redacted"
SERVER_TOOLS_LOST = "calls of tools that the provider runs left out"
TRUNCATED = "content truncated by the log"

NO_MESSAGES = "holds no messages"
_ROLES = {
    "developer": "system",
    "human": "user",
    "function": "tool",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
}
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_LOST_PARTS = {
    "image_url": IMAGES_LOST,
    "image": IMAGES_LOST,
    "input_image": IMAGES_LOST,
    "input_audio": AUDIO_LOST,
    "audio": AUDIO_LOST,
    "file": FILES_LOST,
    "input_file": FILES_LOST,
    "document": FILES_LOST,
}
_JSON = json.JSONEncoder(ensure_ascii=False)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class ChatReader:
    """Reads the messages of one conversation; `losses` collects what they had and ours lack."""

    def __init__(self) -> None:
        self.losses: dict[str, None] = {}
        self._num_legacy_calls = 0

    def messages(self, value: Any, field: str = "messages") -> list[Row]:
        """Returns messages of the chat completions API, old and new, in our shape.

        Raises UnreadableRowError if the value is no list of messages.
        """
        if not isinstance(value, list) or not value:
            detail = f"{field} must be a non-empty list, not {describe(value)}"
            raise UnreadableRowError(NO_MESSAGES, detail)
        items = cast("list[Any]", value)
        return [self.message(item, f"{field}[{i}]") for i, item in enumerate(items)]

    def message(self, value: Any, field: str = "message") -> Row:
        """Returns one message in our shape. Raises UnreadableRowError if it is none."""
        message = cast("Row", value) if isinstance(value, dict) else {}
        role = message.get("role")
        if not isinstance(role, str):
            detail = f"{field} must be an object with a role, not {describe(value)}"
            raise UnreadableRowError("a message has no role", detail)
        ours: Row = {"role": _ROLES.get(role, role), "content": self.text(message.get("content"))}
        if ours["role"] == "assistant":
            self._add_reply(ours, message)
        elif ours["role"] == "tool":
            ours |= self._tool_link(message, is_legacy=role == "function")
        if isinstance(message.get("name"), str):
            ours["name"] = message["name"]
        if message.get("weight") is not None:
            ours["weight"] = message["weight"]
        return ours

    def text(self, content: Any) -> str:
        """Returns the text of a content; its parts that are not text become losses."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = cast("list[Any]", content) if isinstance(content, list) else [content]
        return "".join(self._part_text(part) for part in parts)

    def lose(self, loss: str) -> None:
        """Notes that the source had something that the messages lack."""
        self.losses[loss] = None

    def _part_text(self, part: Any) -> str:
        if isinstance(part, str):
            return part
        fields = cast("Row", part) if isinstance(part, dict) else {}
        kind = fields.get("type", "text")
        if not isinstance(kind, str):
            kind = ""
        text = fields.get(_TEXT_KEYS.get(kind, "text"))
        if isinstance(text, str) and kind in _TEXT_KEYS:
            return text
        self.lose(_LOST_PARTS.get(kind, PARTS_LOST))
        return ""

    def _add_reply(self, ours: Row, message: Row) -> None:
        """Adds the fields that only messages of the assistant have."""
        if not ours["content"] and isinstance(message.get("refusal"), str):
            ours["content"] = message["refusal"]
        if message.get("audio"):
            self.lose(AUDIO_LOST)
        reasoning = (message.get(key) for key in _REASONING_KEYS)
        if text := next((r for r in reasoning if isinstance(r, str) and r), None):
            ours["reasoning_content"] = text
        if calls := [*self._calls(message)]:
            ours["tool_calls"] = calls

    def _calls(self, message: Row) -> Iterator[Row]:
        calls = message.get("tool_calls")
        for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
            yield tool_call(call)
        legacy = message.get("function_call")
        if isinstance(legacy, dict):
            self._num_legacy_calls += 1
            yield tool_call({"id": f"call_{self._num_legacy_calls}", "function": legacy})

    def _tool_link(self, message: Row, *, is_legacy: bool) -> Row:
        if isinstance(message.get("tool_call_id"), str):
            return {"tool_call_id": message["tool_call_id"]}
        return {"tool_call_id": f"call_{self._num_legacy_calls}"} if is_legacy else {}


def tool_call(value: Any) -> Row:
    """Returns a tool call in our shape, its arguments as JSON text.

    Raises UnreadableRowError if it is none.
    """
    call = cast("Row", value) if isinstance(value, dict) else {}
    nested = call.get("function")
    function = cast("Row", nested) if isinstance(nested, dict) else call
    if not isinstance(function.get("name"), str):
        detail = f"a tool call must be an object with a name, not {describe(value)}"
        raise UnreadableRowError("a tool call has no name", detail)
    arguments = json_text(function.get("arguments"))
    ours: Row = {"function": {"name": function["name"], "arguments": arguments}}
    return (
        ({"id": call["id"]} if isinstance(call.get("id"), str) else {})
        | {"type": "function"}
        | ours
    )


def json_text(value: Any) -> str:
    """Returns a value as JSON text; a text is returned as it is, and nothing as an empty object."""
    if isinstance(value, str):
        return value
    return _JSON.encode({} if value is None else value)


def tool_schemas(value: Any) -> list[Row] | None:
    """Returns the schemas of tools in our shape; None if there are none.

    They may be given as JSON text, in the flat form of the Responses API, in Anthropic's form or
    as legacy functions. Raises UnreadableRowError if they are none of these.
    """
    tools: Any = value
    if isinstance(value, str):
        try:
            tools = msgspec.json.decode(value) if value.strip() else None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UnreadableRowError("the tools are not valid JSON", str(error)) from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UnreadableRowError("the tools are no list", f"not {describe(value)}")
    return [_schema(tool) for tool in cast("list[Any]", tools)]


def _schema(tool: Any) -> Row:
    fields = cast("Row", tool) if isinstance(tool, dict) else {}
    nested = fields.get("function")
    function = cast("Row", nested) if isinstance(nested, dict) else fields
    if not isinstance(function.get("name"), str):
        raise UnreadableRowError("a tool has no name", f"it is {describe(tool)}")
    schema = {
        key: function[key]
        for key in ("name", "description", "parameters", "strict")
        if function.get(key) is not None
    }
    if "parameters" not in schema and isinstance(function.get("input_schema"), dict):
        schema["parameters"] = function["input_schema"]
    return {"type": "function", "function": schema}

"""Converts messages of chat APIs, datasets, OpenTelemetry and LangChain to Stillroom's format.

Content that Stillroom's format does not support is dropped, and noted.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from stillroom.data.chat.template import thinking_of
from stillroom.data.checks import describe
from stillroom.importing.json_rows import Row, UnreadableRowError

IMAGES_DROPPED = "images left out"
AUDIO_DROPPED = "audio left out"
FILES_DROPPED = "files left out"
PARTS_DROPPED = "content of an unknown kind left out"
REASONING_DROPPED = "reasoning is encrypted or redacted"
SERVER_TOOLS_DROPPED = "calls of provider-run tools left out"
TRUNCATED = "content truncated by the log"

NO_MESSAGES = "no messages"
_ROLES = {
    "developer": "system",
    "human": "user",
    "function": "tool",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
}
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_DROPPED_PARTS = {
    "image_url": IMAGES_DROPPED,
    "image": IMAGES_DROPPED,
    "input_image": IMAGES_DROPPED,
    "input_audio": AUDIO_DROPPED,
    "audio": AUDIO_DROPPED,
    "file": FILES_DROPPED,
    "input_file": FILES_DROPPED,
    "document": FILES_DROPPED,
}
_JSON = json.JSONEncoder(ensure_ascii=False)


_LANGCHAIN_ROLES = {
    "human": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "HumanMessageChunk": "user",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
}
"""The roles of LangChain's message types."""
_LANGCHAIN_CLASSES = {
    "HumanMessage": "human",
    "AIMessage": "ai",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "function",
}
_CALL_KINDS = {
    "tool_use": ("id", "input"),
    "tool_call": ("id", "arguments"),
    "function_call": ("call_id", "arguments"),
}
"""The block types of tool calls, with the names of their id and arguments."""
_RESULT_KINDS = {
    "tool_result": ("tool_use_id", "content"),
    "tool_call_response": ("id", "response"),
}
_THINKING_KEYS = {"thinking": "thinking", "reasoning": "content"}
_MEDIA_KINDS = ("blob", "uri", "file", "media", "image_file")
_MODALITIES = {"image": IMAGES_DROPPED, "video": FILES_DROPPED, "audio": AUDIO_DROPPED}


class MessageReader:
    """Converts the messages of one conversation; `dropped` collects phrases for what is left out.

    A message's content is a string, or a list of parts or blocks. A message with blocks may become
    several messages, since each tool result in it becomes one.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, None] = {}
        self._num_legacy_calls = 0

    def messages(self, value: Any, field: str = "messages") -> list[Row]:
        """Converts messages of the chat completions API, current or legacy.

        Raises UnreadableRowError if the value is not a list of messages.
        """
        if not isinstance(value, list) or not value:
            detail = f"{field} must be a non-empty list, not {describe(value)}"
            raise UnreadableRowError(NO_MESSAGES, detail)
        items = cast("list[Any]", value)
        return [self.message(item, f"{field}[{i}]") for i, item in enumerate(items)]

    def message(self, value: Any, field: str = "message") -> Row:
        """Converts one message. Raises UnreadableRowError if the value is not a message."""
        message = cast("Row", value) if isinstance(value, dict) else {}
        role = message.get("role")
        if not isinstance(role, str):
            detail = f"{field} must be an object with a role, not {describe(value)}"
            raise UnreadableRowError("a message has no role", detail)
        converted: Row = {
            "role": _ROLES.get(role, role),
            "content": self.text(message.get("content")),
        }
        if converted["role"] == "assistant":
            self._add_reply(converted, message)
        elif converted["role"] == "tool":
            converted |= self._tool_call_id(message, is_legacy=role == "function")
        if isinstance(message.get("name"), str):
            converted["name"] = message["name"]
        if message.get("weight") is not None:
            converted["weight"] = message["weight"]
        return converted

    def text(self, content: Any) -> str:
        """Returns the text of a message's content; records other parts as dropped."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = cast("list[Any]", content) if isinstance(content, list) else [content]
        return "".join(self._part_text(part) for part in parts)

    def drop(self, reason: str) -> None:
        """Records that content was left out; `reason` is a fixed phrase."""
        self.dropped[reason] = None

    def _part_text(self, part: Any) -> str:
        """Returns the text of a content part; drops any other part, and notes it."""
        if isinstance(part, str):
            return part
        fields = cast("Row", part) if isinstance(part, dict) else {}
        kind = fields.get("type", "text")
        if not isinstance(kind, str):
            kind = ""
        text = fields.get(_TEXT_KEYS.get(kind, "text"))
        if isinstance(text, str) and kind in _TEXT_KEYS:
            return text
        self.drop(_DROPPED_PARTS.get(kind, PARTS_DROPPED))
        return ""

    def _add_reply(self, converted: Row, message: Row) -> None:
        """Adds the fields that only assistant messages have."""
        if not converted["content"] and isinstance(message.get("refusal"), str):
            converted["content"] = message["refusal"]
        if message.get("audio"):
            self.drop(AUDIO_DROPPED)
        if text := thinking_of(message):
            converted["reasoning_content"] = text
        if calls := [*self._calls(message)]:
            converted["tool_calls"] = calls

    def _calls(self, message: Row) -> Iterator[Row]:
        """Yields the tool calls of a message, and its legacy function call."""
        calls = message.get("tool_calls")
        for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
            yield tool_call(call)
        legacy = message.get("function_call")
        if isinstance(legacy, dict):
            self._num_legacy_calls += 1
            yield tool_call({"id": f"call_{self._num_legacy_calls}", "function": legacy})

    def _tool_call_id(self, message: Row, *, is_legacy: bool) -> Row:
        """Returns the field `tool_call_id` of a tool message; empty if the id is unknown."""
        if isinstance(message.get("tool_call_id"), str):
            return {"tool_call_id": message["tool_call_id"]}
        return {"tool_call_id": f"call_{self._num_legacy_calls}"} if is_legacy else {}

    def turns(self, value: Any, field: str = "messages") -> list[Row]:
        """Converts messages with blocks. Raises UnreadableRowError if the value is not a list."""
        if not isinstance(value, list):
            raise UnreadableRowError(NO_MESSAGES, f"{field} must be a list, not {describe(value)}")
        converted: list[Row] = []
        for index, item in enumerate(cast("list[Any]", value)):
            converted += self.turn(item, f"{field}[{index}]")
        return converted

    def turn(self, value: Any, field: str = "message") -> list[Row]:
        """Converts one message with blocks. Raises UnreadableRowError if it is not a message.

        Blocks of an assistant message are grouped by kind: texts are joined in order, and so are
        thoughts and calls.
        """
        message = _unwrap_langchain(value)
        blocks = message.get("parts", message.get("content"))
        if not isinstance(blocks, list):
            return [self.message(message, field)]
        turn = _Turn()
        has_calls = bool(message.get("tool_calls"))
        for block in cast("list[Any]", blocks):
            self._add_block(block, turn, has_calls=has_calls)
        fields = {key: item for key, item in message.items() if key != "parts"}
        converted = self.message(fields | {"content": turn.texts}, field)
        return self._assemble(converted, turn)

    def _assemble(self, converted: Row, turn: "_Turn") -> list[Row]:
        """Returns the tool results of a turn, and then its message unless that is empty."""
        if turn.thoughts and not converted.get("reasoning_content"):
            converted["reasoning_content"] = "\n\n".join(turn.thoughts)
        if turn.calls:
            converted["tool_calls"] = turn.calls
        return (
            turn.results
            if turn.results and not converted["content"]
            else [*turn.results, converted]
        )

    def _add_block(self, value: Any, turn: "_Turn", *, has_calls: bool) -> None:
        """Adds a block to the list for its kind in `turn`; drops an unsupported one."""
        block = cast("Row", value) if isinstance(value, dict) else {}
        kind = block.get("type")
        if not isinstance(kind, str):
            turn.texts.append(value)
        elif kind in _CALL_KINDS:
            if not has_calls:
                turn.calls.append(_call(block, *_CALL_KINDS[kind]))
        elif kind in _RESULT_KINDS:
            turn.results.append(self._result(block, *_RESULT_KINDS[kind]))
        elif kind in _THINKING_KEYS:
            if thought := self._thought(block, _THINKING_KEYS[kind]):
                turn.thoughts.append(thought)
        elif (reason := _drop_reason(kind, block)) is not None:
            self.drop(reason)
        elif kind == "text" and "text" not in block:
            turn.texts.append(block.get("content"))
        else:
            turn.texts.append(block)

    def _thought(self, block: Row, key: str) -> str:
        """Returns the text of a thinking block; notes a block without text as dropped."""
        thought = block.get(key) or block.get("reasoning") or block.get("text")
        summary = block.get("summary")
        if not isinstance(thought, str) and isinstance(summary, list):
            thought = "\n".join(
                part["text"]
                for part in cast("list[Any]", summary)
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        if isinstance(thought, str) and thought:
            return thought
        self.drop(REASONING_DROPPED)
        return ""

    def _result(self, block: Row, id_key: str, content_key: str) -> Row:
        """Converts a block to a tool message."""
        content = block.get(content_key, block.get("result"))
        is_text = content is None or isinstance(content, str) or _are_blocks(content)
        text = self.text(content) if is_text else json_text(content)
        converted: Row = {"role": "tool", "content": text}
        if isinstance(block.get(id_key), str):
            converted["tool_call_id"] = block[id_key]
        return converted


def tool_call(value: Any) -> Row:
    """Converts a tool call, with its arguments as JSON text.

    Raises UnreadableRowError if the value is not a tool call.
    """
    call = cast("Row", value) if isinstance(value, dict) else {}
    nested = call.get("function")
    function = cast("Row", nested) if isinstance(nested, dict) else call
    if not isinstance(function.get("name"), str):
        detail = f"a tool call must be an object with a name, not {describe(value)}"
        raise UnreadableRowError("a tool call has no name", detail)
    arguments = json_text(function.get("arguments"))
    converted: Row = {"function": {"name": function["name"], "arguments": arguments}}
    return (
        ({"id": call["id"]} if isinstance(call.get("id"), str) else {})
        | {"type": "function"}
        | converted
    )


def as_context(message: Row) -> Row:
    """Returns a message as context: an assistant message gets weight 0 and is not trained on."""
    return message | {"weight": 0} if message["role"] == "assistant" else message


def json_text(value: Any) -> str:
    """Returns a value as JSON text; a string is returned unchanged, and None as `{}`."""
    if isinstance(value, str):
        return value
    return _JSON.encode({} if value is None else value)


def tool_schemas(value: Any) -> list[Row] | None:
    """Converts tool schemas; returns None if there are none.

    They may be JSON text, in the flat form of the Responses API, in Anthropic's form, or legacy
    functions. Bare names, as in rnow's rows, are not schemas. Raises UnreadableRowError for
    anything else.
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
        raise UnreadableRowError("the tools are not a list", f"they are {describe(value)}")
    if all(isinstance(tool, str) for tool in cast("list[Any]", tools)):
        return None
    return [_schema(tool) for tool in cast("list[Any]", tools)]


def _schema(tool: Any) -> Row:
    """Converts one tool schema. Raises UnreadableRowError if it has no name."""
    fields = cast("Row", tool) if isinstance(tool, dict) else {}
    nested = fields.get("function")
    function = cast("Row", nested) if isinstance(nested, dict) else fields
    if not isinstance(function.get("name"), str):
        shown = f"an object with {', '.join(fields)[:200]}" if fields else describe(tool)
        raise UnreadableRowError("a tool has no name", f"the tool is {shown}")
    schema = {
        key: function[key]
        for key in ("name", "description", "parameters", "strict")
        if function.get(key) is not None
    }
    if "parameters" not in schema and isinstance(function.get("input_schema"), dict):
        schema["parameters"] = function["input_schema"]
    return {"type": "function", "function": schema}


class _Turn:
    """The texts, thoughts, tool calls and tool results in the blocks of one message."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.thoughts: list[str] = []
        self.calls: list[Row] = []
        self.results: list[Row] = []


def _call(block: Row, id_key: str, arguments_key: str) -> Row:
    """Converts a block to a tool call."""
    if not isinstance(block.get("name"), str):
        raise UnreadableRowError("a tool call has no name", f"the call is {describe(block)}")
    arguments = block.get(arguments_key, block.get("args"))
    converted: Row = {"id": block[id_key]} if isinstance(block.get(id_key), str) else {}
    function = {"name": block["name"], "arguments": json_text(arguments)}
    return converted | {"type": "function", "function": function}


def _are_blocks(content: Any) -> bool:
    blocks = cast("list[Any]", content) if isinstance(content, list) else [None]
    return all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks)


def _drop_reason(kind: str, block: Row) -> str | None:
    """Returns the phrase for a block that is dropped from messages; None for any other block."""
    if kind == "redacted_thinking":
        return REASONING_DROPPED
    if kind in _MEDIA_KINDS:
        modality = str(block.get("modality") or block.get("mime_type") or "").partition("/")[0]
        return _MODALITIES.get(modality, FILES_DROPPED)
    prefixes = ("server_tool", "mcp_", "web_search", "code_execution")
    is_run_by_provider = kind.startswith(prefixes) or kind.endswith("_tool_result")
    return SERVER_TOOLS_DROPPED if is_run_by_provider else None


def _unwrap_langchain(value: Any) -> Row:
    """Removes LangChain's serialization around a message, and sets its role."""
    if isinstance(value, list) and len(cast("list[Any]", value)) == 2:
        role, content = cast("list[Any]", value)
        return {"role": _LANGCHAIN_ROLES.get(role, role) if isinstance(role, str) else role,
                "content": content}  # fmt: skip
    message = cast("Row", value) if isinstance(value, dict) else {}
    kind = message.get("type")
    if message.get("lc") is not None and isinstance(message.get("kwargs"), dict):
        path = message.get("id")
        name = str(cast("list[Any]", path)[-1]) if isinstance(path, list) and path else ""
        message = cast("Row", message["kwargs"])
        kind = message.get("type") or _LANGCHAIN_CLASSES.get(name.removesuffix("Chunk"))
    elif isinstance(message.get("data"), dict) and "content" not in message:
        message = cast("Row", message["data"])
    if isinstance(message.get("role"), str) or not isinstance(kind, str):
        return message
    converted = message | {"role": _LANGCHAIN_ROLES.get(kind, kind)}
    extra = message.get("additional_kwargs")
    if isinstance(extra, dict) and not converted.get("tool_calls"):
        names = ("tool_calls", "reasoning_content", "refusal")
        converted |= {name: extra[name] for name in names if extra.get(name)}
    if isinstance(converted.get("tool_calls"), list):
        calls = cast("list[Any]", converted["tool_calls"])
        converted["tool_calls"] = [_rename_args(call) for call in calls]
    return {
        key: item for key, item in converted.items() if key != "name" or converted["role"] == "user"
    }


def _rename_args(call: Any) -> Any:
    """Returns a LangChain tool call with its `args` as `arguments`."""
    if isinstance(call, dict) and "args" in call:
        return cast("Row", call) | {"arguments": cast("Row", call)["args"]}
    return call

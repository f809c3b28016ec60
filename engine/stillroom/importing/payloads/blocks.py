"""Brings messages whose contents are blocks into ours: of Anthropic, OpenTelemetry, LangChain."""

from typing import Any, cast

from stillroom.data.checks import describe
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.messages import (
    AUDIO_LOST,
    FILES_LOST,
    IMAGES_LOST,
    NO_MESSAGES,
    REASONING_LOST,
    SERVER_TOOLS_LOST,
    ChatReader,
    json_text,
)

_TYPE_ROLES = {
    "human": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "HumanMessageChunk": "user",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
}
"""The roles of LangChain's messages by their types."""
_CLASSES = {
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
"""The blocks that are tool calls, with the names of their id and their arguments."""
_RESULT_KINDS = {
    "tool_result": ("tool_use_id", "content"),
    "tool_call_response": ("id", "response"),
}
_THINKING_KEYS = {"thinking": "thinking", "reasoning": "content"}
_MEDIA_KINDS = ("blob", "uri", "file", "media", "image_file")
_MODALITIES = {"image": IMAGES_LOST, "video": FILES_LOST, "audio": AUDIO_LOST}


class BlockReader(ChatReader):
    """Reads messages whose contents are texts or blocks; plain chat messages are read as well.

    One message may become several, as results of tools are messages of their own.
    """

    def turns(self, value: Any, field: str = "messages") -> list[Row]:
        """Returns a list of messages in our shape. Raises UnreadableRowError if it is none."""
        if not isinstance(value, list):
            raise UnreadableRowError(NO_MESSAGES, f"{field} must be a list, not {describe(value)}")
        ours: list[Row] = []
        for index, item in enumerate(cast("list[Any]", value)):
            ours += self.turn(item, f"{field}[{index}]")
        return ours

    def turn(self, value: Any, field: str = "message") -> list[Row]:
        """Returns the messages that one message becomes. Raises UnreadableRowError if it is none.

        Content within an assistant's message that follows on a block of another kind stays in its
        place: texts are joined in their order, thoughts and calls each on their own.
        """
        message = _unwrapped(value)
        blocks = message.get("parts", message.get("content"))
        if not isinstance(blocks, list):
            return [self.message(message, field)]
        turn = _Turn()
        has_calls = bool(message.get("tool_calls"))
        for block in cast("list[Any]", blocks):
            self._sort(block, turn, has_calls=has_calls)
        rest = {key: item for key, item in message.items() if key != "parts"}
        ours = self.message(rest | {"content": turn.texts}, field)
        return self._assembled(ours, turn)

    def _assembled(self, ours: Row, turn: "_Turn") -> list[Row]:
        """Returns a message, and before it the results of tools that it holds."""
        if turn.thoughts and not ours.get("reasoning_content"):
            ours["reasoning_content"] = "\n\n".join(turn.thoughts)
        if turn.calls:
            ours["tool_calls"] = turn.calls
        return turn.results if turn.results and not ours["content"] else [*turn.results, ours]

    def _sort(self, value: Any, turn: "_Turn", *, has_calls: bool) -> None:
        """Puts a block where it belongs in a turn; what we have no place for becomes a loss."""
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
        elif (loss := _loss_of(kind, block)) is not None:
            self.lose(loss)
        elif kind == "text" and "text" not in block:
            turn.texts.append(block.get("content"))
        else:
            turn.texts.append(block)

    def _thought(self, block: Row, key: str) -> str:
        """Returns the text of a thinking block, which is a loss if only its signature is there."""
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
        self.lose(REASONING_LOST)
        return ""

    def _result(self, block: Row, id_key: str, content_key: str) -> Row:
        content = block.get(content_key, block.get("result"))
        is_text = content is None or isinstance(content, str) or _are_blocks(content)
        text = self.text(content) if is_text else json_text(content)
        ours: Row = {"role": "tool", "content": text}
        if isinstance(block.get(id_key), str):
            ours["tool_call_id"] = block[id_key]
        return ours


class _Turn:
    """The blocks of one message, by what they are."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.thoughts: list[str] = []
        self.calls: list[Row] = []
        self.results: list[Row] = []


def _call(block: Row, id_key: str, arguments_key: str) -> Row:
    if not isinstance(block.get("name"), str):
        raise UnreadableRowError("a tool call has no name", f"it is {describe(block)}")
    arguments = block.get(arguments_key, block.get("args"))
    ours: Row = {"id": block[id_key]} if isinstance(block.get(id_key), str) else {}
    function = {"name": block["name"], "arguments": json_text(arguments)}
    return ours | {"type": "function", "function": function}


def _are_blocks(content: Any) -> bool:
    blocks = cast("list[Any]", content) if isinstance(content, list) else [None]
    return all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks)


def _loss_of(kind: str, block: Row) -> str | None:
    """Returns the loss that a block becomes of which messages can hold nothing, else None."""
    if kind == "redacted_thinking":
        return REASONING_LOST
    if kind in _MEDIA_KINDS:
        modality = str(block.get("modality") or block.get("mime_type") or "").partition("/")[0]
        return _MODALITIES.get(modality, FILES_LOST)
    starts = ("server_tool", "mcp_", "web_search", "code_execution")
    is_of_provider = kind.startswith(starts) or kind.endswith("_tool_result")
    return SERVER_TOOLS_LOST if is_of_provider else None


def _unwrapped(value: Any) -> Row:
    """Returns a message without LangChain's serialization around it, and with a role."""
    if isinstance(value, list) and len(cast("list[Any]", value)) == 2:
        role, content = cast("list[Any]", value)
        return {"role": _TYPE_ROLES.get(role, role) if isinstance(role, str) else role,
                "content": content}  # fmt: skip
    message = cast("Row", value) if isinstance(value, dict) else {}
    kind = message.get("type")
    if message.get("lc") is not None and isinstance(message.get("kwargs"), dict):
        path = message.get("id")
        name = str(cast("list[Any]", path)[-1]) if isinstance(path, list) and path else ""
        message = cast("Row", message["kwargs"])
        kind = message.get("type") or _CLASSES.get(name.removesuffix("Chunk"))
    elif isinstance(message.get("data"), dict) and "content" not in message:
        message = cast("Row", message["data"])
    if isinstance(message.get("role"), str) or not isinstance(kind, str):
        return message
    ours = message | {"role": _TYPE_ROLES.get(kind, kind)}
    more = message.get("additional_kwargs")
    if isinstance(more, dict) and not ours.get("tool_calls"):
        ours |= {k: more[k] for k in ("tool_calls", "reasoning_content", "refusal") if more.get(k)}
    if isinstance(ours.get("tool_calls"), list):
        calls = cast("list[Any]", ours["tool_calls"])
        ours["tool_calls"] = [_named(call) for call in calls]
    return {key: item for key, item in ours.items() if key != "name" or ours["role"] == "user"}


def _named(call: Any) -> Any:
    """Returns a tool call of LangChain with its arguments under the name that others use."""
    if isinstance(call, dict) and "args" in call:
        return cast("Row", call) | {"arguments": cast("Row", call)["args"]}
    return call

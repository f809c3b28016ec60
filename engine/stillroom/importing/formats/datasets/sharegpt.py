"""Reads ShareGPT rows: a conversation as turns that say who they are from."""

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from stillroom.data.checks import describe
from stillroom.data.layouts.foreign import as_object
from stillroom.importing.chat_messages import (
    AUDIO_LOST,
    FILES_LOST,
    IMAGES_LOST,
    ChatReader,
    tool_call,
    tool_schemas,
)
from stillroom.importing.formats.datasets.openai_files import other_fields
from stillroom.importing.json_rows import JsonRow, Row, UnreadableRowError, convert_rows, has_row
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
_MEDIA = {"images": IMAGES_LOST, "image": IMAGES_LOST, "audios": AUDIO_LOST, "videos": FILES_LOST}
_FIELDS = ("conversations", "conversation", "system", "tools", "id", "model", *_MEDIA)


def is_sharegpt_row(row: Row) -> bool:
    """Returns whether a row holds turns with `from` and `value`, or `conversations` of messages."""
    turns = row.get("conversations", row.get("conversation"))
    first = as_object(cast("list[Any]", turns)[0]) if isinstance(turns, list) and turns else {}
    are_messages = "conversations" in row and {"role", "content"} <= first.keys()
    return are_messages or ("from" in first and ("value" in first or len(first) == 1))


def conversation_of_sharegpt_row(row: JsonRow) -> LoggedConversation:
    """Returns the conversation of a ShareGPT row. Raises UnreadableRowError if it holds none."""
    data, reader = row.data, ChatReader()
    turns = data.get("conversations", data.get("conversation"))
    if not isinstance(turns, list) or not turns:
        detail = f"conversations must be a non-empty list, not {describe(turns)}"
        raise UnreadableRowError("holds no messages", detail)
    are_messages = "role" in as_object(cast("list[Any]", turns)[0])
    messages = (
        reader.messages(turns, "conversations")
        if are_messages
        else list(_messages(cast("list[Any]", turns)))
    )
    system = data.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    for field, loss in _MEDIA.items():
        if data.get(field):
            reader.lose(loss)
    return LoggedConversation(
        place=row.place,
        messages=messages,
        tools=tool_schemas(data.get("tools")),
        is_call=False,
        id=data["id"] if isinstance(data.get("id"), str) else None,
        model=data["model"] if isinstance(data.get("model"), str) else None,
        losses=tuple(reader.losses),
        metadata=other_fields(data, _FIELDS),
    )


def _messages(turns: list[Any]) -> Iterator[Row]:
    """Yields the messages of turns; a call becomes a message with one or more tool calls."""
    open_calls: list[str] = []
    for index, turn in enumerate(turns):
        fields = as_object(turn)
        name = fields.get("from")
        role = _ROLES.get(name) if isinstance(name, str) else None
        value = fields.get("value")
        if role is None or not isinstance(value, str):
            detail = f"turn {index} must have `from` and the text `value`, not {describe(turn)}"
            raise UnreadableRowError("a turn is from nobody known", detail)
        message: Row = {"role": role, "content": value}
        if role == "call":
            calls = [_call(call, f"call_{index}_{n}") for n, call in enumerate(_decoded(value))]
            open_calls = [call["id"] for call in calls]
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        elif role == "tool" and open_calls:
            message["tool_call_id"] = open_calls.pop(0)
        if fields.get("weight") is not None:
            message["weight"] = fields["weight"]
        yield message


def _decoded(value: str) -> list[Any]:
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UnreadableRowError("a tool call is not valid JSON", str(error)) from error
    return cast("list[Any]", decoded) if isinstance(decoded, list) else [decoded]


def _call(value: Any, call_id: str) -> Row:
    return tool_call({"id": call_id} | as_object(value))


def _rows(row: JsonRow) -> Iterator[SourceRow]:
    yield conversation_of_sharegpt_row(row)


SHAREGPT = TraceFormat(
    name="sharegpt",
    title="ShareGPT datasets",
    is_recognised=has_row(is_sharegpt_row),
    read=lambda paths: convert_rows(paths, _rows),
)

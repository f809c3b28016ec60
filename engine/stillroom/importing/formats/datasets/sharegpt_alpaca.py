"""Reads the rows of datasets of conversations: ShareGPT's turns, and Alpaca's and Dolly's rows.

ShareGPT's turns say who they are from; a row of Alpaca has an instruction, an input that belongs to
it, and an output.
"""

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from stillroom.data.checks import describe
from stillroom.data.layouts.foreign import as_object
from stillroom.importing.formats.datasets.openai_files import other_fields
from stillroom.importing.json_rows import JsonRow, Row, UnreadableRowError, has_row, row_reader
from stillroom.importing.payloads.messages import (
    AUDIO_LOST,
    FILES_LOST,
    IMAGES_LOST,
    ChatReader,
    tool_call,
    tool_schemas,
)
from stillroom.importing.records import LoggedConversation, TraceFormat

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


_OUTPUTS = ("output", "response")
_INPUTS = ("input", "context")
_ALPACA_FIELDS = ("instruction", "system", "history", "id", *_OUTPUTS, *_INPUTS)


def is_alpaca_row(row: Row) -> bool:
    """Returns whether a row has the text of an instruction and that of its output."""
    has_output = any(isinstance(row.get(name), str) for name in _OUTPUTS)
    return isinstance(row.get("instruction"), str) and has_output


def conversation_of_alpaca_row(row: JsonRow) -> LoggedConversation:
    """Returns the conversation of an Alpaca row: the input follows the instruction after a blank
    line.

    Raises UnreadableRowError if it holds none.
    """
    data = row.data
    if not is_alpaca_row(data):
        detail = f"instruction and output must be texts, not {describe(data.get('instruction'))}"
        raise UnreadableRowError("has no instruction and output", detail)
    output = next(data[name] for name in _OUTPUTS if isinstance(data.get(name), str))
    extra = next((data[name] for name in _INPUTS if isinstance(data.get(name), str)), "")
    user = "\n\n".join(text for text in (data["instruction"], extra) if text)
    system = data.get("system")
    has_system = isinstance(system, str) and system
    return LoggedConversation(
        place=row.place,
        messages=[
            *([{"role": "system", "content": system}] if has_system else []),
            *_earlier_turns(data.get("history")),
            {"role": "user", "content": user},
            {"role": "assistant", "content": output},
        ],
        is_call=False,
        id=data["id"] if isinstance(data.get("id"), str) else None,
        metadata=other_fields(data, _ALPACA_FIELDS),
    )


def _earlier_turns(history: Any) -> Iterator[Row]:
    """Yields the messages of earlier turns, which are pairs of a question and its answer."""
    for pair in cast("list[Any]", history) if isinstance(history, list) else []:
        texts = cast("list[Any]", pair) if isinstance(pair, list) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            detail = f"history must hold pairs of texts, not {describe(pair)}"
            raise UnreadableRowError("the history cannot be read", detail)
        yield {"role": "user", "content": texts[0]}
        yield {"role": "assistant", "content": texts[1]}


SHAREGPT = TraceFormat(
    name="sharegpt",
    title="ShareGPT datasets",
    is_recognised=has_row(is_sharegpt_row),
    read=row_reader(lambda row: [conversation_of_sharegpt_row(row)]),
)
ALPACA = TraceFormat(
    name="alpaca",
    title="Alpaca and Dolly datasets",
    is_recognised=has_row(is_alpaca_row),
    read=row_reader(lambda row: [conversation_of_alpaca_row(row)]),
)

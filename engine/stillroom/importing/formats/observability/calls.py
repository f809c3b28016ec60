"""The call that a span holds, in no convention's own shape, and its messages in ours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from stillroom.importing.formats.observability.otlp import Span
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.blocks import BlockReader
from stillroom.importing.payloads.calls import ApiCall
from stillroom.importing.payloads.fields import as_list, as_row, parsed, usage_details, usage_of

_MOST_REMEMBERED, _LONGEST_REMEMBERED = 4096, 8 << 10
"""How many messages are remembered as they were read, and the longest one in bytes."""
_BLOCK_KINDS = frozenset(
    {
        "text",
        "image_url",
        "image",
        "input_text",
        "input_image",
        "tool_use",
        "tool_result",
        "thinking",
    }
)


@dataclass(frozen=True, slots=True)
class Convention:
    """How the attributes of spans name a model call and its messages."""

    is_followed: Callable[[Span], bool]
    """Whether a span follows the convention."""
    is_model_call: Callable[[Span], bool]
    read_call: Callable[[Span], Iterator[ApiCall]]
    """Yields the call of a span, or one for each choice. Raises UnreadableRowError if the span
    holds no messages."""


def span_call(messages: list[Row], *, usage: Row, **facts: Any) -> ApiCall:
    """Returns one reply of a model with the messages before it.

    `usage` has the tokens in the fields of an API's usage object.
    """
    return ApiCall(
        messages=messages, usage=usage_of(usage), metadata=dict(usage_details(usage)), **facts
    )


def read_messages(value: Any, reader: BlockReader) -> list[Row]:
    """Returns messages in our shape; contents that were written as JSON text are read as blocks.

    Parts of one turn that stand in messages of their own are joined again. Raises
    UnreadableRowError if the value is no list of messages.
    """
    if not isinstance(value, list):
        return joined_turns(reader.turns(value))
    turns: list[Row] = []
    for index, item in enumerate(as_list(value)):
        turns += _turn(item, reader, index)
    return joined_turns(turns)


def _turn(item: Any, reader: BlockReader, index: int) -> list[Row]:
    """Returns the messages that one becomes; histories repeat most of them."""
    if stands_alone(item):
        data = msgspec.json.encode(item)
        if len(data) <= _LONGEST_REMEMBERED and (known := _known_turn(data)) is not None:
            return known
    return reader.turn(_with_blocks(item), f"messages[{index}]")


@lru_cache(maxsize=_MOST_REMEMBERED)
def _known_turn(data: bytes) -> list[Row] | None:
    """Returns the messages that one becomes; None if something is lost of it."""
    reader = BlockReader()
    try:
        messages = reader.turn(_with_blocks(msgspec.json.decode(data)))
    except UnreadableRowError:
        return None
    return None if reader.losses else messages


def joined_turns(messages: list[Row]) -> list[Row]:
    """Returns messages with the reasoning, the text and the calls of one turn in one message."""
    joined: list[Row] = []
    for message in messages:
        last = joined[-1] if joined else {"role": ""}
        if message["role"] == last["role"] == "assistant" and _continues(last, message):
            text = message["content"] or last["content"]
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            joined[-1] = (
                last | message | {"content": text} | ({"tool_calls": calls} if calls else {})
            )
        else:
            joined.append(message)
    return joined


def _continues(last: Row, message: Row) -> bool:
    if message.get("reasoning_content"):
        return not last["content"] and "tool_calls" not in last
    return not (message["content"] and last["content"])


def _with_blocks(item: Any) -> Any:
    message = as_row(item)
    content = message.get("content")
    if not isinstance(content, str):
        return item
    blocks = as_list(parsed(content))
    kinds = [as_row(block).get("type") for block in blocks]
    is_blocks = bool(kinds) and all(
        isinstance(kind, str) and kind in _BLOCK_KINDS for kind in kinds
    )
    return message | {"content": blocks} if is_blocks else item


def stands_alone(value: Any) -> bool:
    """Returns whether a message means the same in every history; old calls are numbered in one."""
    message = as_row(value)
    if not isinstance(message.get("role"), str) or message["role"] == "function":
        return False
    return not any(message.get(key) for key in ("function_call", "lc", "data"))

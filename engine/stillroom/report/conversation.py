"""Conversations for display: flat lists of parts with limited lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from stillroom.data.chat.template import thinking_of
from stillroom.types import Message

MAX_TEXT = 800
"""The maximum number of characters of a part."""
_MAX_UNFOLDED, _MAX_EXPANDABLE = 1500, 200_000
_HEAD, _TAIL = 9, 5
"""The number of parts at the beginning and the end of a long conversation that are kept."""

PartKind = Literal["system", "user", "thinking", "text", "answer", "call", "reply"]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a conversation: a text, a tool call or a tool's reply."""

    kind: PartKind
    text: str
    num_hidden: int
    """The number of characters that are cut off at the end."""
    expandable: str = ""
    """The cut-off characters that the page can expand; empty if it cannot."""
    name: str = ""
    """The name of the tool, for calls and replies."""
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ShownConversation:
    """The parts of a conversation, without the middle of a very long one."""

    head: Sequence[Part]
    num_left_out: int
    tail: Sequence[Part]


def conversation(messages: Sequence[Message], *, is_whole: bool = False) -> ShownConversation:
    """Returns the parts of messages; with `is_whole`, all of them, with expandable long texts."""
    limit = _MAX_UNFOLDED if is_whole else MAX_TEXT
    parts = [part for message in messages for part in _parts(message, limit)]
    if is_whole:
        return ShownConversation(parts, 0, ())
    if len(parts) <= _HEAD + _TAIL:
        return ShownConversation(parts, 0, ())
    return ShownConversation(parts[:_HEAD], len(parts) - _HEAD - _TAIL, parts[-_TAIL:])


def num_prompt_messages(messages: Sequence[Message], turns: int) -> int:
    """Returns the number of messages before the last `turns` assistant turns, which are sampled.

    If there are fewer assistant turns, or `turns` is 0, it returns the number of all messages.
    """
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return indices[-turns] if 0 < turns <= len(indices) else len(messages)


def _parts(message: Message, limit: int) -> Iterator[Part]:
    text = _text(message)
    match message["role"]:
        case "system":
            yield _part("system", text, limit)
        case "assistant":
            yield from _assistant_parts(message, text, limit)
        case "tool":
            # This prefix marks errors of the engine, see stillroom.tools.source.
            is_error = text.startswith("error:")
            name = str(message.get("name") or "")
            yield _part("reply", text or "(empty)", limit, name=name, is_error=is_error)
        case _:
            yield _part("user", text, limit)


def _assistant_parts(message: Message, text: str, limit: int) -> Iterator[Part]:
    if thinking := thinking_of(message):
        yield _part("thinking", thinking, limit)
    calls: list[Any] = message.get("tool_calls") or []
    if text.strip() or not calls:
        yield _part("text" if calls else "answer", text if text.strip() else "(empty)", limit)
    for call in calls:
        function = call["function"]
        yield _part("call", _arguments(function["arguments"]), limit, name=function["name"])


def _part(kind: PartKind, text: str, limit: int, *, name: str = "", is_error: bool = False) -> Part:
    """Returns a part with at most `limit` characters of the text."""
    text = text.strip("\n")
    # Pages with whole conversations put the end of a long part into a collapsed element.
    expandable = text[limit : limit + _MAX_EXPANDABLE] if limit == _MAX_UNFOLDED else ""
    return Part(kind, text[:limit], max(0, len(text) - limit), expandable, name, is_error)


def _text(message: Message) -> str:
    """Returns a message's content as text; a part that is not text is shown as `[type]`."""
    content: Any = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content)


def _arguments(raw: Any) -> str:
    """Returns the arguments as `name=value, …`, or unchanged if they are not a JSON object."""
    try:
        value = msgspec.json.decode(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError):
        return str(raw)
    if not isinstance(value, dict):
        return str(raw)
    arguments = cast("dict[str, Any]", value)
    return ", ".join(
        f"{name}={msgspec.json.encode(argument).decode()}" for name, argument in arguments.items()
    )

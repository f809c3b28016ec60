"""Conversations as the report shows them: flat lists of parts of limited length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from stillroom.data.chat.template import thinking_of
from stillroom.report.wording import cut
from stillroom.types import Message

MAX_TEXT = 800
"""Characters of one part."""
_MAX_UNFOLDED, _MAX_REST = 1500, 200_000
_HEAD, _TAIL = 9, 5
"""Parts of a long conversation that are kept at its beginning and at its end."""

PartKind = Literal["system", "user", "thinking", "text", "answer", "call", "reply"]


@dataclass(frozen=True, slots=True)
class Part:
    """One shown part: a text, a tool call or a tool's reply."""

    kind: PartKind
    text: str
    num_hidden: int
    """Characters that were left out at the end."""
    rest: str = ""
    """The characters that the page can unfold; empty if it cannot."""
    name: str = ""
    """The tool's name, for calls and replies."""
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ShownConversation:
    """The parts of a conversation, without the middle of a very long one."""

    head: Sequence[Part]
    num_left_out: int
    tail: Sequence[Part]


def conversation(messages: Sequence[Message], *, is_whole: bool = False) -> ShownConversation:
    """Returns the messages as parts; `is_whole` keeps all and makes long ones unfoldable."""
    limit = _MAX_UNFOLDED if is_whole else MAX_TEXT
    parts = [part for message in messages for part in _parts(message, limit)]
    if is_whole:
        return ShownConversation(parts, 0, ())
    if len(parts) <= _HEAD + _TAIL:
        return ShownConversation(parts, 0, ())
    return ShownConversation(parts[:_HEAD], len(parts) - _HEAD - _TAIL, parts[-_TAIL:])


def num_given(messages: Sequence[Message], turns: int) -> int:
    """Returns how many messages came before the model's first of `turns` turns."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return replies[-turns] if 0 < turns <= len(replies) else len(messages)


def _parts(message: Message, limit: int) -> Iterator[Part]:
    text = _text(message)
    match message["role"]:
        case "system":
            yield _part("system", text, limit)
        case "assistant":
            yield from _assistant_parts(message, text, limit)
        case "tool":
            # The engine's own errors begin so, see stillroom.tools.source.
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
    text = text.strip("\n")
    shown = cut(text, limit)
    # A page that shows whole parts hides the rest of a long one behind a fold.
    rest = text[limit : limit + _MAX_REST] if limit == _MAX_UNFOLDED else ""
    return Part(kind, shown.text, shown.num_hidden, rest, name, is_error)


def _text(message: Message) -> str:
    content: Any = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content)


def _arguments(written: Any) -> str:
    """Returns the arguments as `name=value, …`, or as written if they are no JSON object."""
    try:
        value = msgspec.json.decode(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        return str(written)
    if not isinstance(value, dict):
        return str(written)
    arguments = cast("dict[str, Any]", value)
    return ", ".join(
        f"{name}={msgspec.json.encode(one).decode()}" for name, one in arguments.items()
    )

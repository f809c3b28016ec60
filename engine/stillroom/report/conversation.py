"""Conversations as the report shows them: flat lists of parts of limited length."""

from collections.abc import Iterator, Mapping, Sequence
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


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """The function that an assistant message calls, with its arguments."""

    name: str = ""
    arguments: Any = ""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of an assistant message."""

    function: Function = Function()


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a message that the report shows."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Call] | None = None
    name: str | None = None
    reasoning_content: str | None = None


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


def conversation(messages: Sequence[ChatMessage], *, is_whole: bool = False) -> ShownConversation:
    """Returns the messages as parts; `is_whole` keeps all and makes long ones unfoldable."""
    limit = _MAX_UNFOLDED if is_whole else MAX_TEXT
    parts = [part for message in messages for part in _parts(message, limit)]
    if is_whole:
        return ShownConversation(parts, 0, ())
    if len(parts) <= _HEAD + _TAIL:
        return ShownConversation(parts, 0, ())
    return ShownConversation(parts[:_HEAD], len(parts) - _HEAD - _TAIL, parts[-_TAIL:])


def chat_messages(rows: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Returns the messages of a row that has no problems."""
    return [
        ChatMessage(
            role=row["role"],
            content=row.get("content"),
            tool_calls=[
                Call(function=Function(name=made["name"], arguments=made["arguments"]))
                for call in row.get("tool_calls") or []
                for made in [call["function"]]
            ],
            name=name if isinstance(name := row.get("name"), str) else None,
            reasoning_content=thinking_of(cast("Message", row)) or None,
        )
        for row in rows
    ]


def num_given(messages: Sequence[ChatMessage], turns: int) -> int:
    """Returns how many messages came before the model's first of `turns` turns."""
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return replies[-turns] if 0 < turns <= len(replies) else len(messages)


def _parts(message: ChatMessage, limit: int) -> Iterator[Part]:
    text = _text(message)
    match message.role:
        case "system":
            yield _part("system", text, limit)
        case "assistant":
            yield from _assistant_parts(message, text, limit)
        case "tool":
            # The engine's own errors begin so, see stillroom.tools.source.
            is_error = text.startswith("error:")
            name = message.name or ""
            yield _part("reply", text or "(empty)", limit, name=name, is_error=is_error)
        case _:
            yield _part("user", text, limit)


def _assistant_parts(message: ChatMessage, text: str, limit: int) -> Iterator[Part]:
    if message.reasoning_content:
        yield _part("thinking", message.reasoning_content, limit)
    calls = message.tool_calls or []
    if text.strip() or not calls:
        yield _part("text" if calls else "answer", text if text.strip() else "(empty)", limit)
    for call in calls:
        yield _part("call", _arguments(call.function.arguments), limit, name=call.function.name)


def _part(kind: PartKind, text: str, limit: int, *, name: str = "", is_error: bool = False) -> Part:
    text = text.strip("\n")
    shown = cut(text, limit)
    # What a page does not leave out it can unfold.
    rest = text[limit : limit + _MAX_REST] if limit == _MAX_UNFOLDED else ""
    return Part(kind, shown.text, shown.num_hidden, rest, name, is_error)


def _text(message: ChatMessage) -> str:
    content = message.content
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

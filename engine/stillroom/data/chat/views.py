"""Rows for people to read: tokens as text, with the role of each and the training mask."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator

from stillroom.data.chat.render import ChatRenderer, RenderedConversation
from stillroom.data.chat.template import plain_text

MAX_TOKENS_SHOWN = 12_000
_TEMPLATE = "template"
"""The role of tokens that no message holds: headers, ends of turns, tool schemas."""
_WINDOW = 4
"""How many of the tokens before one can change its text, e.g. remove its leading blank."""
_MAX_SPLIT = 8
"""The most tokens of which one character can consist."""


class ShownToken(msgspec.Struct, frozen=True, array_like=True):
    """A token as text, or several tokens that together make one character."""

    text: str
    ids: list[int]
    is_trained: bool
    role: str
    """The role of the message that holds the token; `template` if none does."""


class SequenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of tokens as the trainer sees it."""

    title: str | None
    """The title of the sequence; None if it is the only one of its row."""
    pieces: list[ShownToken]
    num_tokens: int
    num_trained: int
    num_left_out: int
    """The number of tokens at the end that are not shown."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation of a row; `title` is None if it is the only one."""

    title: str | None
    messages: list[dict[str, Any]]


class RowView(msgspec.Struct, frozen=True, kw_only=True):
    """One row for a page: its conversations and, if there is a model, its tokens."""

    where: str
    format: str
    reward: float | None
    problem: str | None
    raw: str | None
    """The line itself if it has a problem, else None."""
    sections: list[Section] = []
    sequences: list[SequenceView] = []


def _page_name(name: str | None) -> str | None:
    """Returns the name of a page. Raises ValueError unless it ends with .html.

    Otherwise a page might replace a data file.
    """
    if name is not None and not name.endswith(".html"):
        raise ValueError(f"{name!r} must end with .html")
    return name


PageName = Annotated[str | None, AfterValidator(_page_name)]
"""The type of a request's field that names a page to write."""


def sections_of(row: dict[str, Any]) -> list[Section]:
    """Returns the conversations of a row in our layout, which must have no problems."""
    if "chosen" in row:
        return [
            Section(title=name, messages=row[name]) for name in ("prompt", "chosen", "rejected")
        ]
    return [Section(title=None, messages=row["messages"])]


def titled_sequences(
    row: dict[str, Any], renderer: ChatRenderer
) -> list[tuple[str | None, RenderedConversation]]:
    """Returns the token sequences that training makes of a row; several of them have titles."""
    tools = row.get("tools") or []
    if "chosen" not in row:
        rendered = renderer.sequences(row["messages"], tools)
        total = len(rendered)
        return [
            (f"sequence {number} of {total}" if total > 1 else None, one)
            for number, one in enumerate(rendered, start=1)
        ]
    num_given_turns = sum(message["role"] == "assistant" for message in row["prompt"])
    return [
        (
            side,
            renderer.conversation(
                [*row["prompt"], *row[side]], tools, num_given_turns=num_given_turns
            ),
        )
        for side in ("chosen", "rejected")
    ]


def sequence_view(
    title: str | None,
    conversation: RenderedConversation,
    messages: Sequence[Any],
    renderer: ChatRenderer,
    *,
    limit: int,
) -> SequenceView:
    """Returns the first `limit` tokens of a sequence one by one, each with its role."""
    shown = RenderedConversation(
        conversation.text, conversation.ids[:limit], conversation.trained[:limit]
    )
    spans, at = _message_spans(conversation.text, messages), 0
    pieces: list[ShownToken] = []
    for text, ids, is_trained in token_texts(shown, renderer.decode):
        role = "assistant" if is_trained else _role_at(spans, at, at + len(text))
        pieces.append(ShownToken(text, ids, is_trained, role))
        at += len(text)
    return SequenceView(
        title=title,
        pieces=pieces,
        num_tokens=len(conversation.ids),
        num_trained=sum(conversation.trained),
        num_left_out=len(conversation.ids) - len(shown.ids),
    )


def token_texts(
    conversation: RenderedConversation, decode: Callable[[list[int]], str]
) -> Iterator[tuple[str, list[int], bool]]:
    """Yields `(text, ids, is_trained)` token by token; the texts add up to the whole text.

    Tokens that together make one character are yielded together if all or none are trained.
    """
    ids, trained = conversation.ids, conversation.trained
    start = 0
    for end in range(1, len(ids) + 1):
        before = ids[max(0, start - _WINDOW) : start]
        text = decode([*before, *ids[start:end]])[len(decode(before)) :]
        is_split = text.endswith("\N{REPLACEMENT CHARACTER}") and end - start < _MAX_SPLIT
        if is_split and end < len(ids) and trained[end] == trained[start]:
            continue
        yield text, ids[start:end], trained[start]
        start = end


def _message_spans(text: str, messages: Sequence[Any]) -> list[tuple[int, int, str]]:
    """Returns `(start, end, role)` of each message whose content is found in the text, in order.

    This only colours a page. The training mask does not depend on it.
    """
    spans: list[tuple[int, int, str]] = []
    at = 0
    for message in messages:
        content = plain_text(message).strip()
        start = text.find(content, at) if content else -1
        if start >= 0:
            at = start + len(content)
            spans.append((start, at, message["role"]))
    return spans


def _role_at(spans: list[tuple[int, int, str]], start: int, end: int) -> str:
    while spans and spans[0][1] <= start:
        spans.pop(0)
    return spans[0][2] if spans and spans[0][0] < end else _TEMPLATE

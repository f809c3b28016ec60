"""Rows for people: whose words each token is, and which tokens are trained."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator

from stillroom.data.chat.render import ChatRenderer, RenderedConversation
from stillroom.data.chat.template import plain_text

MAX_TOKENS_SHOWN = 12_000
TEMPLATE = "template"
"""The role of what no message says: headers, ends of turns, tool schemas."""
_WINDOW = 4
"""Tokens before one that may change how it reads, as a blank at the beginning of a text does."""
_MAX_SPLIT = 8
"""Tokens that one character may be made of."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A token as text; several where a character is made of several."""

    text: str
    ids: list[int]
    is_trained: bool
    role: str
    """Of the message that says it, else `template`."""


class SequenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of tokens as the trainer sees it."""

    title: str | None
    """Where a row is several sequences."""
    pieces: list[Piece]
    num_tokens: int
    num_trained: int
    num_left_out: int
    """Tokens at the end that are not shown."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation of a row."""

    title: str | None
    messages: list[dict[str, Any]]


class RowView(msgspec.Struct, frozen=True, kw_only=True):
    """One row as a page shows it: tokens where a model was given, else conversations."""

    where: str
    format: str
    reward: float | None
    problem: str | None
    raw: str | None
    """The line itself, where it has a problem."""
    sections: list[Section] = []
    sequences: list[SequenceView] = []


def _page_name(name: str | None) -> str | None:
    """Returns a page's name. Raises ValueError where a page would replace a file of data."""
    if name is not None and not name.endswith(".html"):
        raise ValueError(f"{name!r} must end with .html")
    return name


PageName = Annotated[str | None, AfterValidator(_page_name)]
"""The name of a page to write, of a request."""


def sections_of(row: dict[str, Any]) -> list[Section]:
    """Returns the conversations of a row in our layout that has no problems."""
    if "chosen" in row:
        return [
            Section(title=name, messages=row[name]) for name in ("prompt", "chosen", "rejected")
        ]
    return [Section(title=None, messages=row["messages"])]


def titled_sequences(
    row: dict[str, Any], renderer: ChatRenderer
) -> list[tuple[str | None, RenderedConversation]]:
    """Returns the token sequences that training makes of a row, each with a title if several."""
    tools = row.get("tools") or []
    if "chosen" not in row:
        rendered = renderer.sequences(row["messages"], tools)
        total = len(rendered)
        return [
            (f"sequence {number} of {total}" if total > 1 else None, one)
            for number, one in enumerate(rendered, start=1)
        ]
    given = sum(message["role"] == "assistant" for message in row["prompt"])
    return [
        (
            side,
            renderer.conversation([*row["prompt"], *row[side]], tools, num_given_turns=given),
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
    """Returns the first `limit` tokens of a sequence one by one, with the role of who says each."""
    shown = RenderedConversation(
        conversation.text, conversation.ids[:limit], conversation.trained[:limit]
    )
    spans, at = _said(conversation.text, messages), 0
    pieces: list[Piece] = []
    for text, ids, is_trained in token_texts(shown, renderer.decode):
        role = "assistant" if is_trained else _role_at(spans, at, at + len(text))
        pieces.append(Piece(text, ids, is_trained, role))
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
    """Yields the tokens with their texts, which add up to the text of all.

    Tokens that are a part of a character only, and trained alike, come together.
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


def _said(text: str, messages: Sequence[Any]) -> list[tuple[int, int, str]]:
    """Returns where the messages' contents stand in the text, in their order.

    It colours a page, no more: what is trained never hangs on it.
    """
    spans: list[tuple[int, int, str]] = []
    at = 0
    for message in messages:
        said = plain_text(message).strip()
        found = text.find(said, at) if said else -1
        if found >= 0:
            at = found + len(said)
            spans.append((found, at, message["role"]))
    return spans


def _role_at(spans: list[tuple[int, int, str]], start: int, end: int) -> str:
    while spans and spans[0][1] <= start:
        spans.pop(0)
    return spans[0][2] if spans and spans[0][0] < end else TEMPLATE

"""Views of rows for people: the text of each token, with its role and the training mask."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator

from stillroom.data.chat.render import ChatRenderer, RenderedConversation
from stillroom.data.chat.template import plain_text

MAX_TOKENS_SHOWN = 12_000
_TEMPLATE_ROLE = "template"
"""The role of tokens outside of messages: headers, ends of turns, tool schemas."""
_CONTEXT_TOKENS = 4
"""The number of preceding tokens that can change a token's text, e.g. its leading space."""
_MAX_TOKENS_PER_CHARACTER = 8
"""The largest number of tokens that can encode a single character."""


class ShownToken(msgspec.Struct, frozen=True, array_like=True):
    """A token as text, or several tokens that encode a single character."""

    text: str
    ids: list[int]
    is_trained: bool
    role: str
    """The role of the message that contains the token; `template` outside of messages."""


class SequenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of tokens as the trainer sees it."""

    title: str | None
    """The title of the sequence; None if its row has only one."""
    pieces: list[ShownToken]
    num_tokens: int
    num_trained: int
    num_left_out: int
    """The number of tokens at the end that are not shown."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation of a row; `title` is None if the row has only one."""

    title: str | None
    messages: list[dict[str, Any]]


class RowView(msgspec.Struct, frozen=True, kw_only=True):
    """One row for a page: its conversations and, with a student, its tokens."""

    where: str
    format: str
    reward: float | None
    problem: str | None
    raw: str | None
    """The text of the line if it has a problem, else None."""
    sections: list[Section] = []
    sequences: list[SequenceView] = []


def _check_page_name(name: str | None) -> str | None:
    """Returns the name of a page. Raises ValueError unless it ends with .html.

    Otherwise the page could replace a data file.
    """
    if name is not None and not name.endswith(".html"):
        raise ValueError(f"{name!r} must end with .html")
    return name


PageName = Annotated[str | None, AfterValidator(_check_page_name)]
"""The type of a request field that names a page to write."""


def sections_of(row: dict[str, Any]) -> list[Section]:
    """Returns the conversations of a row in Stillroom's layout without problems."""
    if "chosen" in row:
        return [
            Section(title=name, messages=row[name]) for name in ("prompt", "chosen", "rejected")
        ]
    return [Section(title=None, messages=row["messages"])]


def titled_sequences(
    row: dict[str, Any], renderer: ChatRenderer
) -> list[tuple[str | None, RenderedConversation]]:
    """Returns the sequences that training makes of a row, with titles if there are several."""
    tools = row.get("tools") or []
    if "chosen" not in row:
        sequences = renderer.sequences(row["messages"], tools)
        total = len(sequences)
        return [
            (f"sequence {number} of {total}" if total > 1 else None, sequence)
            for number, sequence in enumerate(sequences, start=1)
        ]
    num_given_turns = sum(message["role"] == "assistant" for message in row["prompt"])
    return [
        (
            answer,
            renderer.conversation(
                [*row["prompt"], *row[answer]], tools, num_given_turns=num_given_turns
            ),
        )
        for answer in ("chosen", "rejected")
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
    spans, position = _message_spans(conversation.text, messages), 0
    pieces: list[ShownToken] = []
    for text, ids, is_trained in token_texts(shown, renderer.decode):
        role = "assistant" if is_trained else _role_at(spans, position, position + len(text))
        pieces.append(ShownToken(text, ids, is_trained, role))
        position += len(text)
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
    """Yields `(text, ids, is_trained)` of each token; the joined texts are the whole text.

    Tokens that encode a single character are yielded together if all or none of them are trained.
    """
    ids, trained = conversation.ids, conversation.trained
    start = 0
    for end in range(1, len(ids) + 1):
        before = ids[max(0, start - _CONTEXT_TOKENS) : start]
        text = decode([*before, *ids[start:end]])[len(decode(before)) :]
        is_split = (
            text.endswith("\N{REPLACEMENT CHARACTER}") and end - start < _MAX_TOKENS_PER_CHARACTER
        )
        if is_split and end < len(ids) and trained[end] == trained[start]:
            continue
        yield text, ids[start:end], trained[start]
        start = end


def _message_spans(text: str, messages: Sequence[Any]) -> list[tuple[int, int, str]]:
    """Returns `(start, end, role)` of each message whose content is in the text, in order.

    It is used for the colours of a page only, not for the training mask.
    """
    spans: list[tuple[int, int, str]] = []
    position = 0
    for message in messages:
        content = plain_text(message).strip()
        start = text.find(content, position) if content else -1
        if start >= 0:
            position = start + len(content)
            spans.append((start, position, message["role"]))
    return spans


def _role_at(spans: list[tuple[int, int, str]], start: int, end: int) -> str:
    """Returns the role of the text from `start` to `end`, and removes the spans before it."""
    while spans and spans[0][1] <= start:
        spans.pop(0)
    return spans[0][2] if spans and spans[0][0] < end else _TEMPLATE_ROLE

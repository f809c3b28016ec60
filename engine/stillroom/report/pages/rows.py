"""The page of a data file's rows: conversations, or every token and whether it is trained on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.data.chat.views import RowView, Section, SequenceView, ShownToken
from stillroom.data.inspect import InspectExamples, Inspection
from stillroom.report.conversation import ShownConversation, chat_messages, conversation
from stillroom.report.environment import render_page, write_page
from stillroom.report.wording import number

_NEWLINE = "↵\n"


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text as the page shows it."""

    text: str
    role: str
    is_trained: bool
    ids: str


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """A sequence of tokens as the page shows it."""

    title: str | None
    num_tokens: int
    num_trained: int
    num_left_out: int
    tokens: Sequence[Token]


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation of a row as the page shows it."""

    title: str | None
    parts: ShownConversation


@dataclass(frozen=True, slots=True)
class RowPart:
    """One row as the page shows it."""

    where: str
    format: str
    reward: str | None
    problem: str | None
    raw: str | None
    talks: Sequence[Talk]
    sequences: Sequence[TokenBlock]


def write_rows_page(path: Path, inspection: Inspection, request: InspectExamples) -> None:
    """Writes the page of the inspected rows."""
    first = request.start + 1
    html = render_page(
        "rows.html.j2",
        name=request.path,
        model=request.model,
        first=first,
        last=first + len(inspection.rows) - 1,
        total=inspection.page.total_count,
        rows=[_row(row) for row in inspection.rows],
    )
    write_page(path, html)


def _row(row: RowView) -> RowPart:
    return RowPart(
        where=row.where,
        format=row.format,
        reward=None if row.reward is None else number(row.reward),
        problem=row.problem,
        raw=row.raw,
        talks=[] if row.sequences else talks(row.sections),
        sequences=[_sequence(sequence) for sequence in row.sequences],
    )


def talks(sections: Sequence[Section]) -> list[Talk]:
    """Returns whole conversations, in which long texts can be unfolded."""
    return [
        Talk(section.title, conversation(chat_messages(section.messages), is_whole=True))
        for section in sections
    ]


def _sequence(sequence: SequenceView) -> TokenBlock:
    return TokenBlock(
        title=sequence.title,
        num_tokens=sequence.num_tokens,
        num_trained=sequence.num_trained,
        num_left_out=sequence.num_left_out,
        tokens=list(_tokens(sequence.pieces)),
    )


def _tokens(pieces: Sequence[ShownToken]) -> Iterator[Token]:
    for piece in pieces:
        text = piece.text.replace("\r", "␍").replace("\n", _NEWLINE)
        ids = ", ".join(map(str, piece.ids))
        yield Token(text, piece.role, piece.is_trained, ids)

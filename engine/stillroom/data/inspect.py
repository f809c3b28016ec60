"""Shows rows as text: their conversations or, with a student, also the trained tokens."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from pydantic import Field

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.template import plain_text
from stillroom.data.chat.views import (
    MAX_TOKENS_SHOWN,
    PageName,
    RowView,
    Section,
    SequenceView,
    sections_of,
    sequence_view,
    titled_sequences,
)
from stillroom.data.checks import Problem, as_number, decode_row
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import count_rows, read_row_lines, rollout_files
from stillroom.data.tool_names import NamedTools
from stillroom.errors import DataError, InputError, ModelError
from stillroom.outputs import ReplacingRequest
from stillroom.settings import Workspace
from stillroom.types import OthersText

TRAINED_OPEN, TRAINED_CLOSE = "⟦", "⟧"
_OTHER_BRACKETS = str.maketrans({TRAINED_OPEN: "[", TRAINED_CLOSE: "]"})
"""Brackets in the text of a row must not look like those around trained tokens."""
_LINE_BREAK = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_MAX_TEXT = 4000
_NOT_SHOWN = "(not shown: no row of this file has a known format)"


class InspectExamples(ReplacingRequest):
    """The request to show rows; with a model, also which of their tokens would be trained."""

    path: Annotated[str, Field(description="Data file or folder")]
    start: Annotated[int, Field(ge=0, description="First row, from 0")] = 0
    n: Annotated[int, Field(ge=1, le=20)] = 2
    model: Annotated[str | None, Field(description="Student: mark trained tokens with ⟦ ⟧")] = None
    chat_template: Annotated[str | None, Field(description="Instead of its own, e.g. chatml")] = (
        None
    )
    include_thinking: bool = False
    html: PageName = None


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One row as text for an agent, with its token counts if there is a model."""

    where: str
    format: str
    text: OthersText
    """The conversation; with a model, its rendered text with the trained parts in ⟦ ⟧."""
    num_tokens: int | None
    num_trained_tokens: int | None
    reward: float | None
    problem: OthersText | None


class ExamplesPage(msgspec.Struct, frozen=True, kw_only=True):
    """The requested rows of a file, and the start of the next page."""

    examples: list[Example]
    total_count: int
    has_more: bool
    next_start: int | None
    html: str | None = None
    """The path of the page that was written; None if none was requested."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The requested rows in two forms: as text for an agent, and for a page."""

    page: ExamplesPage
    rows: list[RowView]


def inspect_examples(
    workspace: Workspace,
    request: InspectExamples,
    *,
    tokenizer: Any = None,
    named_tools: NamedTools | None = None,
) -> Inspection:
    """Returns the requested rows; with the student's `tokenizer`, also their training mask.

    `named_tools` are the schemas for rows with tool names. Raises InputError if `start` is beyond
    the last row.
    """
    path = workspace.existing(request.path, label="path")
    renderer = None
    if tokenizer is not None:
        renderer = ChatRenderer(
            tokenizer, include_thinking=request.include_thinking, named_tools=named_tools
        )
    end = request.start + request.n
    limit = MAX_TOKENS_SHOWN if request.html else _MAX_TEXT
    views: list[tuple[Path, RowView]] = []
    recognized = set[Path]()
    total = 0
    for file in rollout_files(path):
        before, total = total, total + count_rows(file)
        if total <= request.start or before >= end:
            continue
        for number, (where, data) in enumerate(_lines(file), start=before):
            if file not in recognized and _format_of(data) is not None:
                recognized.add(file)
            if request.start <= number < end:
                views.append((file, _row_view(where, data, renderer, limit=limit)))
            elif number >= end and file in recognized:
                break
    rows = [view if file in recognized else _without_text(view) for file, view in views]
    if request.start >= total:
        raise InputError(
            f"start {request.start} is beyond the {total} rows",
            f"choose a start below {total}" if total else "add rows to the file, which is empty",
        )
    has_more = total > end
    page = ExamplesPage(
        examples=[_example(view) for view in rows],
        total_count=total,
        has_more=has_more,
        next_start=end if has_more else None,
    )
    return Inspection(page=page, rows=rows)


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the location (`file:line`) and the JSON text of each row."""
    for line in read_row_lines(file):
        data = line.data
        if file.suffix == ".txt":
            data = msgspec.json.encode({"prompt": data.decode("utf-8", errors="replace")})
        yield f"{file.name}:{line.number}", data


def _format_of(data: bytes) -> RowFormat | None:
    row = decode_row(data)
    return None if isinstance(row, Problem) else detect_format(row)


def row_view(where: str, data: bytes) -> RowView:
    """Returns one row for a page, without its text if its format is unknown."""
    view = _row_view(where, data, None, limit=0)
    return view if _format_of(data) is not None else _without_text(view)


def _without_text(view: RowView) -> RowView:
    """Returns the view without the row's text, for files without a row of a known format.

    Such a file may be anything, e.g. a list of passwords or the settings of another program.
    """
    return msgspec.structs.replace(view, raw=_NOT_SHOWN)


def _row_view(where: str, data: bytes, renderer: ChatRenderer | None, *, limit: int) -> RowView:
    """Returns one row for a page; with a renderer, also its first `limit` tokens."""
    row = decode_row(data)
    row_format = None if isinstance(row, Problem) else detect_format(row)
    if isinstance(row, Problem) or row_format is None:
        problem = row.message if isinstance(row, Problem) else "has no known format"
        return _invalid_row(where, "unknown", f"the line {problem}", data)
    problems = list(CHECKS[row_format](row))
    if problems:
        return _invalid_row(where, row_format, f"{problems[0].field} {problems[0].message}", data)
    row = _chat_row(row, row_format)
    try:
        can_train = row_format is not RowFormat.PROMPTS
        sequences = _sequence_views(row, renderer if can_train else None, limit=limit)
        sections = sections_of(row)
        for section in sections:
            _section_text(section)
    except (ModelError, DataError) as error:
        return _invalid_row(where, row_format, error.problem, data)
    return RowView(
        where=where,
        format=row_format,
        reward=as_number(row.get("reward")),
        problem=None,
        raw=None,
        sections=sections,
        sequences=sequences,
    )


def _chat_row(row: dict[str, Any], row_format: RowFormat) -> dict[str, Any]:
    """Returns a row without problems as chat messages in Stillroom's layout."""
    if row_format is RowFormat.ROLLOUTS:
        return as_rollout(row)
    return {"messages": task_from_row(row).messages} if row_format is RowFormat.PROMPTS else row


def _sequence_views(
    row: dict[str, Any], renderer: ChatRenderer | None, *, limit: int
) -> list[SequenceView]:
    if renderer is None:
        return []
    views: list[SequenceView] = []
    for title, rendered in titled_sequences(row, renderer):
        is_answer = title in ("chosen", "rejected")
        messages = [*row["prompt"], *row[title]] if is_answer else row["messages"]
        views.append(sequence_view(title, rendered, messages, renderer, limit=limit))
    return views


def _example(view: RowView) -> Example:
    """Returns a row as text; with a student, also the number of its tokens."""
    sequences = view.sequences
    if view.raw is not None:
        text = view.raw
    else:
        texts = [_titled(sequence.title, bracketed_text(sequence)) for sequence in sequences] or [
            _titled(section.title, _section_text(section)) for section in view.sections
        ]
        text = _truncate("\n".join(texts))
    return Example(
        where=view.where,
        format=view.format,
        text=text,
        num_tokens=sum(sequence.num_tokens for sequence in sequences) if sequences else None,
        num_trained_tokens=sum(sequence.num_trained for sequence in sequences)
        if sequences
        else None,
        reward=view.reward,
        problem=view.problem,
    )


def bracketed_text(sequence: SequenceView) -> str:
    """Returns the text of the tokens, with ⟦ ⟧ around the trained ones."""
    parts: list[str] = []
    for is_trained, pieces in groupby(sequence.pieces, key=lambda piece: piece.is_trained):
        text = "".join(piece.text for piece in pieces).translate(_OTHER_BRACKETS)
        parts.append(f"{TRAINED_OPEN}{text}{TRAINED_CLOSE}" if is_trained else text)
    return "".join(parts)


def _titled(title: str | None, text: str) -> str:
    return f"== {title}\n{text}" if title else text


def _section_text(section: Section) -> str:
    """Returns a conversation as text; each message and call begins with its role."""
    lines: list[str] = []
    for message in cast("list[Any]", section.messages):
        text = plain_text(message)
        if text or not message.get("tool_calls"):
            lines.append(f"{message['role']}: {text}")
        for call in message.get("tool_calls") or []:
            function = call["function"]
            lines.append(f"{message['role']} calls {function['name']}({function['arguments']})")
    # Only lines with a role are not indented, so that a text cannot look like another message.
    return "\n".join(_LINE_BREAK.sub("\n  ", line) for line in lines)


def _invalid_row(where: str, row_format: str, problem: str, data: bytes) -> RowView:
    raw = _truncate(data.decode("utf-8", errors="replace"))
    return RowView(where=where, format=row_format, reward=None, problem=problem, raw=raw)


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + f"… ({len(text)} characters)"

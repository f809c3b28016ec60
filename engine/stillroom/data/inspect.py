"""Rows as a person reads them, and as the trainer sees them: which tokens are trained."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from stillroom.data.checks import Problem, as_number, decode_row
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts import as_rollout
from stillroom.data.render import ChatRenderer, RenderedConversation, plain_text
from stillroom.data.row_files import read_row_lines, rollout_files
from stillroom.errors import DataError, InputError, ModelError
from stillroom.settings import Workspace

TRAINED_OPEN, TRAINED_CLOSE = "⟦", "⟧"
_MAX_TEXT = 4000


class InspectExamples(BaseModel):
    """Ask to see rows; with a model also the mask of what its training would train."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, Field(description="Data file, or folder of .jsonl or .json files")]
    start: Annotated[int, Field(ge=0, description="First row, from 0")] = 0
    n: Annotated[int, Field(ge=1, le=20)] = 2
    model: Annotated[str | None, Field(description="Student: mark the trained tokens with ⟦ ⟧")] = (
        None
    )


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One row as text."""

    where: str
    format: str
    text: str
    """The conversation; with a model its rendered text, trained parts in ⟦ ⟧."""
    num_tokens: int | None
    num_trained_tokens: int | None
    reward: float | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class _Shown:
    """A row as text; with the student's template also how many tokens it has."""

    text: str
    num_tokens: int | None = None
    num_trained_tokens: int | None = None


class ExamplesPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows of a file."""

    examples: list[Example]
    total_count: int
    has_more: bool
    next_start: int | None


def inspect_examples(
    workspace: Workspace, request: InspectExamples, *, tokenizer: Any = None
) -> ExamplesPage:
    """Returns the asked rows; `tokenizer` (of the student) is needed for the mask."""
    path = workspace.existing(request.path, what="path")
    renderer = ChatRenderer(tokenizer) if tokenizer is not None else None
    end = request.start + request.n
    examples: list[Example] = []
    total = 0
    for total, (where, data) in enumerate(_lines(path), start=1):
        if request.start < total <= end:
            examples.append(_example(where, data, renderer))
    if request.start >= total:
        raise InputError(
            f"start {request.start} is beyond the {total} rows of {request.path!r}",
            f"choose a start below {total}" if total else "the file holds no rows",
        )
    has_more = total > end
    return ExamplesPage(
        examples=examples,
        total_count=total,
        has_more=has_more,
        next_start=end if has_more else None,
    )


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in rollout_files(path):
        for line in read_row_lines(file):
            data = line.data
            if file.suffix == ".txt":
                data = msgspec.json.encode({"prompt": data.decode("utf-8", errors="replace")})
            yield f"{file.name}:{line.number}", data


def _example(where: str, data: bytes, renderer: ChatRenderer | None) -> Example:
    row = decode_row(data)
    row_format = None if isinstance(row, Problem) else detect_format(row)
    if isinstance(row, Problem) or row_format is None:
        problem = row.message if isinstance(row, Problem) else "is of no known format"
        return _broken(where, "unknown", f"the line {problem}", data)
    problems = list(CHECKS[row_format](row))
    if problems:
        return _broken(where, row_format, f"{problems[0].field} {problems[0].message}", data)
    row = _chat_row(row, row_format)
    try:
        shown = _shown(row, None if row_format is RowFormat.PROMPTS else renderer)
    except (ModelError, DataError) as error:
        return _broken(where, row_format, error.problem, data)
    return Example(
        where=where,
        format=row_format,
        text=_cut(shown.text),
        num_tokens=shown.num_tokens,
        num_trained_tokens=shown.num_trained_tokens,
        reward=as_number(row.get("reward")),
        problem=None,
    )


def _chat_row(row: dict[str, Any], row_format: RowFormat) -> dict[str, Any]:
    """Returns a row without problems with its conversation as chat messages."""
    if row_format is RowFormat.ROLLOUTS:
        return as_rollout(row)
    return {"messages": task_from_row(row).messages} if row_format is RowFormat.PROMPTS else row


def _shown(row: dict[str, Any], renderer: ChatRenderer | None) -> _Shown:
    if renderer is None:
        return _Shown(_plain_view(row))
    rendered = _rendered(row, renderer)
    return _Shown(
        "\n".join(mask_view(conversation, renderer) for conversation in rendered),
        sum(len(conversation.ids) for conversation in rendered),
        sum(sum(conversation.trained) for conversation in rendered),
    )


def _rendered(row: dict[str, Any], renderer: ChatRenderer) -> list[RenderedConversation]:
    tools = row.get("tools") or []
    if "chosen" not in row:
        return [renderer.conversation(row["messages"], tools)]
    given = sum(message["role"] == "assistant" for message in row["prompt"])
    return [
        renderer.conversation([*row["prompt"], *row[side]], tools, num_given_turns=given)
        for side in ("chosen", "rejected")
    ]


def mask_view(conversation: RenderedConversation, renderer: ChatRenderer) -> str:
    """Returns the text of the tokens, with ⟦ ⟧ around what is trained."""
    parts: list[str] = []
    for is_trained, ids in _stretches(conversation):
        text = renderer.decode(ids)
        parts.append(f"{TRAINED_OPEN}{text}{TRAINED_CLOSE}" if is_trained else text)
    return "".join(parts)


def _stretches(conversation: RenderedConversation) -> Iterator[tuple[bool, list[int]]]:
    start = 0
    trained = conversation.trained
    for index in range(1, len(trained) + 1):
        if index == len(trained) or trained[index] != trained[start]:
            yield trained[start], conversation.ids[start:index]
            start = index


def _plain_view(row: dict[str, Any]) -> str:
    if "chosen" in row:
        sides = [
            ("prompt", row["prompt"]),
            ("chosen", row["chosen"]),
            ("rejected", row["rejected"]),
        ]
        return "\n".join(f"== {name}\n{_conversation_view(side)}" for name, side in sides)
    return _conversation_view(row["messages"])


def _conversation_view(messages: Sequence[Any]) -> str:
    lines: list[str] = []
    for message in messages:
        text = plain_text(message)
        if text or not message.get("tool_calls"):
            lines.append(f"{message['role']}: {text}")
        for call in message.get("tool_calls") or []:
            function = call["function"]
            lines.append(f"{message['role']} calls {function['name']}({function['arguments']})")
    return "\n".join(lines)


def _broken(where: str, row_format: str, problem: str, data: bytes) -> Example:
    return Example(
        where=where,
        format=row_format,
        text=_cut(data.decode("utf-8", errors="replace")),
        num_tokens=None,
        num_trained_tokens=None,
        reward=None,
        problem=problem,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + f"… ({len(text)} characters)"

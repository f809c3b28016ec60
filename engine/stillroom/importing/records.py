"""The records that a format's reader yields for each row of its source files."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.layouts.foreign import as_object
from stillroom.errors import FailureClass
from stillroom.settings import Workspace
from stillroom.types import StopReason, Usage


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a source row."""

    path: Path
    line: int
    """The 1-based line number; in files without lines, the row number."""
    part: str = ""
    """The part of the line, such as a span's id; empty for the whole line."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}{'#' if self.part else ''}{self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedConversation:
    """The messages of one source row: a model call with its history, or a whole conversation."""

    location: Location
    messages: list[dict[str, Any]]
    """The messages in OpenAI's chat format with `reasoning_content`; a call's last message is the
    model's reply. Contents are strings; in a call, they may be lists of parts."""
    is_call: bool
    """Whether it is one model call, which repeats the history of earlier calls and is joined with
    them. A whole conversation is never joined."""
    tools: list[dict[str, Any]] | None = None
    """The schemas of the offered tools; None if the source does not log them."""
    group: str | None = None
    """The source's id of the session, thread or trace. Rows of different groups are never joined;
    rows without a group are joined by their messages alone."""
    id: str | None = None
    """The row's id in the source, to which feedback may refer."""
    feedback_ids: tuple[str, ...] = ()
    """Other ids by which feedback may refer to this row, such as its trace's id."""
    ids: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional ids of the row by field name; ids in `metadata` need not be repeated."""
    merged_from: tuple[Location, ...] = ()
    """The locations of other rows that were merged into this one, such as a batch's request if
    `location` is the result's. The reader yields nothing else for these rows."""
    parent: str | None = None
    """The source's id of the row that this one continues or branches from."""
    provider: str | None = None
    model: str | None = None
    """The model that answered, as the source names it."""
    usage: Usage | None = None
    cost_usd: float | None = None
    started_at: str | None = None
    """When the call began (ISO 8601)."""
    duration_s: float | None = None
    finish_reason: str | None = None
    """Why the reply ended, as in chat completions: stop, length, tool_calls or content_filter."""
    error: str | None = None
    """The error that the source recorded instead of a reply."""
    failure: FailureClass | None = None
    """The kind of the error; None if the source does not say."""
    stop_reason: StopReason | None = None
    """Why the rollout ended; None if the source does not use these values."""
    tool_errors: int | None = None
    """The number of tool calls whose result was an error; None if the source does not say."""
    answered_by: tuple[str, ...] = ()
    """The models that the endpoint named as answering, if they are not just `model`."""
    scores: dict[str, float] = field(default_factory=dict[str, float])
    """The scores of the row by name, such as an evaluator's, or a user's thumb (0 or 1)."""
    dropped: tuple[str, ...] = ()
    """What the source had but the messages lack, in fixed phrases such as `images left out`."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of the source, such as tags or an expected answer."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """A score that the source stores in a separate row."""

    location: Location
    target_id: str
    """The id of the scored row: its `id`, an additional id, one in its metadata, or its group."""
    name: str
    value: float
    column: str = ""
    """The column of a table that has `target_id`; empty for formats without columns."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A source row that is not imported: it has no conversation, or cannot be read."""

    location: Location
    reason: str
    """The reason, a fixed phrase by which refused rows are counted."""
    detail: str = ""
    """What is wrong with this row, and how to correct it."""
    columns: tuple[str, ...] = ()
    """The names of the columns, if the row stands for a whole table."""


INCOMPLETE = "not completed"
"""The phrase in `dropped` of a conversation that ends with an answer, but did not complete."""
NO_NUMBER = "feedback without a number"
NO_CALL_FOUND = "feedback on a call that was not imported"
"""Reasons for which feedback is refused."""


def feedback_row(
    location: Location,
    target_id: str | None,
    name: str | None,
    value: float | None,
    label: Any = None,
    *,
    column: str = "",
) -> Feedback | RefusedRow:
    """Returns feedback, or a RefusedRow if it has no target, no score name or no numeric value.

    `label` is the score as the source wrote it, which the refusal quotes. `column` is the name of
    the target's column.
    """
    if not target_id or name is None:
        detail = "it has no call id or no score name"
        return RefusedRow(location, "feedback without a target", detail)
    if value is None:
        return RefusedRow(location, NO_NUMBER, f"{name}: {label}")
    return Feedback(location, target_id, name, value, column)


SourceRow = LoggedConversation | Feedback | RefusedRow


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format that can be imported: its name, how its files are recognised, and its reader."""

    name: str
    title: str
    """The system and the kind of file, as shown to users."""
    is_recognised: Callable[[Path, bytes], bool]
    """Returns whether a file has this format, given its path and the result of `read_head`."""
    read: Callable[[Sequence[Path]], Iterator[SourceRow]]
    """Yields every row of the files once, in constant memory where the format permits."""
    read_columns: Callable[[Sequence[Path], Mapping[str, str]], Iterator[SourceRow]] | None = None
    """The reader of a table, called with column names by role (see `datasets/tables.py`); None if
    the format has no columns to choose."""


IMPORTED_FROM = "imported_from"
"""The field of a prompt's metadata with the location of its source row."""
_LOCATION = re.compile(r"(.*?):(\d+)(?:#(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImportedFrom:
    """The locations of the source rows of an imported row."""

    kept: Location
    others: list[Location]
    """The locations of earlier calls, in the order of the conversation, and of copies."""


def imported_from(workspace: Workspace, data: bytes) -> ImportedFrom | None:
    """Returns the locations recorded in a row of import_rollouts; None if there are none."""
    try:
        row = as_object(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    origin = as_object(row.get("origin"))
    kept = origin.get("source") or as_object(row.get("metadata")).get(IMPORTED_FROM)
    location = _parse_location(workspace, kept)
    if location is None:
        return None
    others = (_parse_location(workspace, other) for other in origin.get("sources") or ())
    return ImportedFrom(location, [other for other in others if other is not None])


def _parse_location(workspace: Workspace, text: Any) -> Location | None:
    """Parses a location such as `logs/a.jsonl:12#choice 1`; returns None for anything else."""
    match = _LOCATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    return Location(Path(workspace.path(match[1])), int(match[2]), match[3] or "")

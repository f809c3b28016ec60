"""What the reader of a format yields for each row of a source."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.layouts.foreign import as_object
from stillroom.settings import Workspace
from stillroom.types import Usage


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a source row."""

    path: Path
    line: int
    """The number of its line from 1; in files without lines, of its row."""
    part: str = ""
    """The row within the line, such as the id of one of many spans; empty if it is the line."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}{'#' if self.part else ''}{self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedConversation:
    """The messages of one source row: a model call with its history, or a whole conversation."""

    place: Place
    messages: list[dict[str, Any]]
    """The messages in the OpenAI chat shape with `reasoning_content`; a call's last message is the
    model's reply. Contents are texts, in a call also parts."""
    is_call: bool
    """Whether it is one call, which repeats the history of the calls before it and is joined with
    them; a whole conversation is never joined with another."""
    tools: list[dict[str, Any]] | None = None
    """The schemas of the offered tools; None if the source does not say which were offered."""
    group: str | None = None
    """The source's id of the session, thread or trace that the row belongs to. Rows of different
    groups are never joined; rows without one are joined by their messages alone."""
    id: str | None = None
    """The row's id in the source, to which feedback may refer."""
    judged_as: tuple[str, ...] = ()
    """Further ids under which feedback may refer to it, such as its trace's."""
    ids: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further ids of the row by the name of their field; those in its metadata need not be here."""
    also_at: tuple[Place, ...] = ()
    """The places of other rows that it is put together from, such as a batch's request where
    `place` is that of the result; nothing else is yielded for these rows."""
    parent: str | None = None
    """The source's id of the row that this one continues or branches from."""
    provider: str | None = None
    model: str | None = None
    """The model that answered, as the source names it."""
    usage: Usage | None = None
    cost_usd: float | None = None
    started_at: str | None = None
    """When the call began, in ISO 8601."""
    duration_s: float | None = None
    finish_reason: str | None = None
    """Why the reply ended, in the words of chat completions: stop, length, tool_calls,
    content_filter."""
    error: str | None = None
    """The failure that the source recorded instead of a reply."""
    scores: dict[str, float] = field(default_factory=dict[str, float])
    """The judgements of the row by name, such as an evaluator's or a person's thumb (0 or 1)."""
    losses: tuple[str, ...] = ()
    """What the source had and the messages lack, in a few fixed words such as `content truncated
    by the log`."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other facts that the source holds about the row, such as tags or an expected answer."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """A judgement in a row of its own, about another row."""

    place: Place
    about: str
    """The id of the judged row, another id of it or in its metadata, or its group."""
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A source row that holds no conversation, or one that cannot be read."""

    place: Place
    reason: str
    """The reason in a few fixed words, by which refusals are counted."""
    detail: str = ""
    """What is wrong with this row in particular, and what to do about it."""


def feedback_row(
    place: Place, about: str | None, name: str | None, value: float | None, label: Any = None
) -> Feedback | Refusal:
    """Returns a judgement, or the refusal of one without a target or a number.

    `label` is what was judged in words.
    """
    if not about or name is None:
        detail = "it names no call, or not what it judges"
        return Refusal(place, "feedback without a target", detail)
    if value is None:
        return Refusal(place, "feedback without a number", f"{name}: {label}")
    return Feedback(place, about, name, value)


SourceRow = LoggedConversation | Feedback | Refusal


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format: its name, how its files are recognised, and its reader."""

    name: str
    title: str
    """The system and the kind of file, as a person calls them."""
    is_recognised: Callable[[Path, bytes], bool]
    """Whether a file has this format, judged by its path and its first 64 KiB, or its first MiB if
    its first row is longer."""
    read: Callable[[Sequence[Path]], Iterator[SourceRow]]
    """Yields every row of the files once, in constant memory but for what it must hold together."""
    read_columns: Callable[[Sequence[Path], Mapping[str, str]], Iterator[SourceRow]] | None = None
    """The reader of a table, which is given the name of the column that holds each thing (see
    `datasets/tables.py`); None if the format has no columns to choose."""


IMPORTED_FROM = "imported_from"
"""The field of a prompt's metadata with the place of the row that it was cut out of."""
_PLACE = re.compile(r"(.*?):(\d+)(?:#(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImportedFrom:
    """The places of the rows behind an imported row."""

    kept: Place
    others: list[Place]
    """The places of the earlier calls, in the order of the conversation, and of copies."""


def imported_from(workspace: Workspace, data: bytes) -> ImportedFrom | None:
    """Returns the source rows of a row that import_rollouts wrote; None if it names none."""
    try:
        row = as_object(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    origin = as_object(row.get("origin"))
    kept = origin.get("source") or as_object(row.get("metadata")).get(IMPORTED_FROM)
    place = _named_place(workspace, kept)
    if place is None:
        return None
    others = (_named_place(workspace, other) for other in origin.get("sources") or ())
    return ImportedFrom(place, [other for other in others if other is not None])


def _named_place(workspace: Workspace, shown: Any) -> Place | None:
    """Returns the place that a text such as `logs/a.jsonl:12#choice 1` names."""
    found = _PLACE.fullmatch(shown) if isinstance(shown, str) else None
    if found is None:
        return None
    return Place(Path(workspace.path(found[1])), int(found[2]), found[3] or "")

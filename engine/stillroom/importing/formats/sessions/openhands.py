"""Reads the events of OpenHands: those of its SDK, of its older versions, and of its benchmarks."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.importing.formats.sessions.openhands_events import EventLog, is_event, is_old_event
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    head_rows,
    read_document,
    read_json_rows,
)
from stillroom.importing.payloads.fields import as_list, as_row
from stillroom.importing.records import Refusal, SourceRow, TraceFormat

_STATE = "base_state.json"


def read_conversations(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversations of event files, with one held at a time.

    The files of an `events` folder are one conversation, as is any other file of events; a row with
    a `history` is one of its own. A condensation begins a new one.
    """
    log: EventLog | None = None
    for path in sorted(paths, key=_sort_key):
        if path.name == _STATE:
            continue
        folder = path.parent if path.parent.name == "events" else None
        if log is not None and (folder is None or log.folder != folder):
            yield from log.end()
            log = None
        for row in read_json_rows(path):
            if isinstance(row, Refusal):
                yield row
            elif isinstance(row.data.get("history"), list):
                yield from _history(row)
            else:
                log = log or _log_of(row, folder)
                yield from log.add(row.data)
    if log is not None:
        yield from log.end()


def _log_of(row: JsonRow, folder: Path | None) -> EventLog:
    if folder is None:
        return EventLog(row.place, id=None)
    state = read_document(folder.parent / _STATE)
    return EventLog(row.place, id=folder.parent.name, folder=folder, state=state)


def _history(row: JsonRow) -> Iterator[SourceRow]:
    """Yields the conversations of a benchmark's result."""
    log = EventLog(row.place, id=str(row.data.get("instance_id") or "") or None)
    log.note_result(row.data)
    for item in as_list(row.data["history"]):
        # Old results hold pairs of an action and its observation.
        for event in as_list(item) or [item]:
            yield from log.add(as_row(event))
    yield from log.end()


def _sort_key(path: Path) -> tuple[str, list[tuple[int, str]]]:
    parts = re.split(r"(\d+)", path.name)
    return str(path.parent), [(int(p), "") if p.isdecimal() else (-1, p) for p in parts]


def _is_recognised(path: Path, head: bytes) -> bool:
    rows = head_rows(head)
    if path.name == _STATE:
        return any("execution_status" in row or "agent_state" in row for row in rows)
    return any(_is_row(row) for row in rows)


def _is_row(row: Row) -> bool:
    history = as_list(row.get("history"))
    events = as_list(history[0]) or history if history else [row]
    first = as_row(events[0])
    return is_event(first) or is_old_event(first)


OPENHANDS = TraceFormat(
    name="openhands",
    title="OpenHands conversations and benchmark results",
    is_recognised=_is_recognised,
    read=read_conversations,
)

"""Finds the input rows that a row was made from, by their content and not by their place."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.convert import supervised_row
from stillroom.curate.rows.read import CuratedRow, read_curated_rows
from stillroom.data.checks import Problem
from stillroom.data.formats import task_from_row
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines
from stillroom.errors import DataError
from stillroom.lineage import Manifest
from stillroom.lines import Line
from stillroom.rollout.request import with_system

MAX_ALIKE = 4
"""The most rows with the same content that are listed."""


class Ids(msgspec.Struct, frozen=True):
    """The ids that rows of our formats can have; a field that a row lacks is None."""

    id: Any = None
    rollout_id: Any = None
    task_id: Any = None
    chosen_id: Any = None
    rejected_id: Any = None

    def has(self, wanted: str) -> bool:
        """Returns whether this is one of the row's ids; a task id does not count."""
        return wanted in (self.id, self.rollout_id, self.chosen_id, self.rejected_id)


class _Pair(msgspec.Struct, frozen=True):
    prompt: list[Any]
    chosen: list[Any]
    rejected: list[Any]


_IDS = msgspec.json.Decoder(Ids)
_PAIR = msgspec.json.Decoder(_Pair)
Match = tuple[Path, Line]


def ids_of(data: bytes) -> Ids:
    """Returns the ids of a row; all of them are None if the line is not a JSON object."""
    try:
        return _IDS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Ids()


def find_row(file: Path, wanted: int | str) -> Line | None:
    """Returns the row at a line number, or the first row with an id; None if there is none."""
    if isinstance(wanted, int):
        return next((line for line in read_row_lines(file) if line.number == wanted), None)
    needle = msgspec.json.encode(wanted)[1:-1]
    for rollout in read_curated_rows(file):
        line = rollout.line
        is_known = rollout.facts is not None and rollout.facts.id == wanted
        if is_known or (needle in line.data and ids_of(line.data).has(wanted)):
            return line
    return None


def converted_from(file: Path, row: bytes) -> Iterator[Match]:
    """Yields the rollouts in a file that convert to exactly these bytes."""
    wanted = ids_of(row).rollout_id
    for rollout in read_curated_rows(file, with_parts=True):
        facts, parts = rollout.facts, rollout.parts
        if facts is None or parts is None or (facts.id or None) != wanted:
            continue
        if b"".join(supervised_row(facts, parts)) == row:
            yield file, rollout.line


def copied_from(file: Path, row: bytes) -> Iterator[Match]:
    """Yields the rows in a file that have exactly these bytes."""
    for line in read_row_lines(file):
        if line.data == row:
            yield file, line


def scored_from(file: Path, row: bytes) -> Iterator[Match]:
    """Yields the rows in a file with the same id and messages; their rewards may differ."""
    ids, messages = ids_of(row).id, _messages(row)
    for line in read_row_lines(file):
        if ids_of(line.data).id == ids and _messages(line.data) == messages:
            yield file, line


def paired_from(file: Path, row: bytes, side: str) -> Iterator[Match]:
    """Yields the rollouts of a pair's task that begin with the messages of one side of the pair.

    `side` is chosen or rejected. If the pair names the rollout's id, it must match as well.
    """
    ids, pair = ids_of(row), _PAIR.decode(row)
    wanted = ids.chosen_id if side == "chosen" else ids.rejected_id
    said = pair.prompt + (pair.chosen if side == "chosen" else pair.rejected)
    for rollout in read_curated_rows(file):
        if _may_be(rollout, wanted, ids.task_id) and rollout.messages[: len(said)] == said:
            yield file, rollout.line


def asked_by(file: Path, task_id: str, manifest: Manifest) -> Iterator[Match]:
    """Yields the prompts in a file whose task has this id.

    The id covers the system prompt that the request of the manifest adds to each prompt.
    """
    system = manifest.request.get("system")
    decode = decode_text_line if file.suffix == ".txt" else decode_line
    for line in read_row_lines(file):
        row = decode(line)
        if isinstance(row, Problem):
            continue
        if _task_id(row, system if isinstance(system, str) else None) == task_id:
            yield file, line


def _task_id(row: dict[str, Any], system: str | None) -> str | None:
    try:
        return with_system([task_from_row(row)], system)[0].task_id
    except (DataError, KeyError, TypeError, AttributeError):
        return None  # it is no prompt


def _may_be(rollout: CuratedRow, wanted: Any, task_id: Any) -> bool:
    facts = rollout.facts
    return facts is not None and facts.task_id == task_id and wanted in (None, facts.id)


def _messages(data: bytes) -> Any:
    try:
        row = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    return row.get("messages", row.get("conversation")) if isinstance(row, dict) else data


def alike(files: list[Path], find: Callable[[Path], Iterator[Match]]) -> list[Match]:
    """Returns up to MAX_ALIKE rows that `find` yields, from the first file where it finds any."""
    for file in files:
        found: list[Match] = []
        for match in find(file):
            found.append(match)
            if len(found) == MAX_ALIKE:
                break
        if found:
            return found
    return []

"""Finds the input rows that a row was made from, by their content and not by their place."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.curate.convert import supervised_row
from stillroom.curate.rows import CuratedRow, read_curated_rows
from stillroom.curate.sources import ImportedFile, foreign_files, imported_file
from stillroom.data.checks import Problem
from stillroom.data.formats import task_from_row
from stillroom.data.instruction import Instruction
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines
from stillroom.data.row_names import MAX_CANDIDATES, RowNames, ambiguous, is_named
from stillroom.errors import DataError, EngineError
from stillroom.lineage import Manifest
from stillroom.lines import Line
from stillroom.rollout.plan import with_system
from stillroom.settings import Workspace
from stillroom.trace.origins import Origin
from stillroom.types import Message

_IMPORTS_ITSELF = ("convert_rollouts", "filter_dataset", "make_dpo_pairs")
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


def row_at(file: Path, number: int) -> Line | None:
    """Returns the row at a line number; None if there is none."""
    return next((line for line in read_row_lines(file) if line.number == number), None)


def name_at(file: Path, number: int) -> str | None:
    """Returns the name of the row at a line number; None if there is none."""
    names = RowNames()
    for line in read_row_lines(file):
        name = names.name(file, line.view)
        if line.number == number:
            return name
    return None


class FoundRows:
    """The rows of a file that a name, a beginning of one, or an id may mean."""

    def __init__(self, file: Path, wanted: str) -> None:
        self._wanted = wanted
        self.lines: list[Line] = []
        """The first of the rows."""
        self._names: list[str] = []
        self._num_rows = 0
        needle, names = msgspec.json.encode(wanted)[1:-1], RowNames()
        for rollout in read_curated_rows(file):
            line = rollout.line
            name = names.name(file, line.view)
            is_known = rollout.facts is not None and rollout.facts.id == wanted
            is_in = is_known or (needle in line.data and ids_of(line.data).has(wanted))
            if not is_in and not is_named(name, wanted):
                continue
            self._num_rows += 1
            if len(self.lines) < MAX_CANDIDATES:
                # A copy, since a view keeps the whole block that was read in memory.
                self.lines.append(msgspec.structs.replace(line, view=line.data))
                self._names.append(name)

    def the_one(self, shown: str) -> Line | None:
        """Returns the row; None if there is none. `shown` is the file's name.

        Raises InputError if there are several.
        """
        if self._num_rows > 1:
            pairs = zip(self._names, self.lines, strict=True)
            places = [f"{name} ({shown}:{line.number})" for name, line in pairs]
            raise ambiguous(self._wanted, places, self._num_rows)
        return self.lines[0] if self.lines else None


def rows_instruction(manifest: Manifest | None) -> Instruction:
    """Returns what an operation put before the conversations of the rows that it wrote."""
    system = manifest.request.get("system") if manifest is not None else None
    return Instruction(system if isinstance(system, str) else None)


def converted_from(file: Path, row: bytes, instruction: Instruction) -> Iterator[Match]:
    """Yields the rollouts in a file that convert to exactly these bytes with an instruction."""
    wanted = ids_of(row).rollout_id
    for rollout in read_curated_rows(file, with_parts=True):
        facts, parts = rollout.facts, rollout.parts
        if facts is None or parts is None or (facts.id or None) != wanted:
            continue
        if b"".join(supervised_row(facts, parts, instruction)) == row:
            yield file, rollout.line


def copied_from(file: Path, row: bytes) -> Iterator[Match]:
    """Yields the rows in a file that have exactly these bytes."""
    for line in read_row_lines(file):
        if line.data == row:
            yield file, line


def scored_from(file: Path, row: bytes) -> Iterator[Match]:
    """Yields the rows in a file with the same id and messages; their rewards may differ."""
    ids, messages = ids_of(row).id, messages_of(row)
    for line in read_row_lines(file):
        if ids_of(line.data).id == ids and messages_of(line.data) == messages:
            yield file, line


def paired_from(file: Path, row: bytes, side: str, instruction: Instruction) -> Iterator[Match]:
    """Yields the rollouts of a pair's task that begin with the messages of one side of the pair.

    `side` is chosen or rejected. If the pair gives the rollout's name, or in older files its id,
    that must match as well.
    """
    ids, pair = ids_of(row), _PAIR.decode(row)
    wanted = ids.chosen_id if side == "chosen" else ids.rejected_id
    said = pair.prompt + (pair.chosen if side == "chosen" else pair.rejected)
    names = RowNames()
    for rollout in read_curated_rows(file):
        name = names.name(file, rollout.line.view)
        is_it = name == wanted or _may_be(rollout, wanted, ids.task_id)
        messages = cast("list[Message]", rollout.messages)
        if is_it and instruction.put_before(messages)[: len(said)] == said:
            yield file, rollout.line


def asked_by(file: Path, task_id: str, manifest: Manifest) -> Iterator[Match]:
    """Yields the prompts in a file whose task has this id.

    The id covers the system prompt that the request of the manifest adds to each prompt.
    """
    system, is_text = system_in_ids(manifest), file.suffix == ".txt"
    for line in read_row_lines(file):
        if prompt_task_id(line, system, is_text=is_text) == task_id:
            yield file, line


def system_in_ids(manifest: Manifest | None) -> str | None:
    """Returns the system message that is part of the ids of the tasks of a file of rollouts.

    That of an evaluation is not, so that evaluations with and without one are comparable.
    """
    if manifest is None or manifest.operation != "generate_rollouts":
        return None
    return rows_instruction(manifest).system


def prompt_task_id(line: Line, system: Any, *, is_text: bool) -> str | None:
    """Returns the id of the task of a prompt, to which a system message may be added.

    None if the line holds no prompt.
    """
    row = (decode_text_line if is_text else decode_line)(line)
    if isinstance(row, Problem):
        return None
    return _task_id(row, system if isinstance(system, str) else None)


def _task_id(row: dict[str, Any], system: str | None) -> str | None:
    try:
        return with_system(task_from_row(row), system).task_id
    except (DataError, KeyError, TypeError, AttributeError):
        return None  # it is no prompt


def _may_be(rollout: CuratedRow, wanted: Any, task_id: Any) -> bool:
    facts = rollout.facts
    return facts is not None and facts.task_id == task_id and wanted in (None, facts.id)


def messages_of(data: bytes) -> Any:
    """Returns the messages of a rollout of ours or of rnow; the data itself if there are none."""
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


def logs_among(workspace: Workspace, origin: Origin, files: Iterable[Path]) -> list[Path]:
    """Returns the inputs of a file that the operation which wrote it had to import first."""
    if origin.manifest is None or origin.manifest.operation not in _IMPORTS_ITSELF:
        return []
    return [file for file in files if foreign_files(workspace, str(file)) is not None]


@contextmanager
def imported_again(workspace: Workspace, logs: Sequence[Path]) -> Generator[ImportedFile | None]:
    """Yields the rollouts that an operation read of other systems' files; None if there are none.

    The same files give the same rollouts each time.
    """
    with ExitStack() as stack:
        imported = None
        if logs:
            names = [str(file) for file in logs]
            with suppress(EngineError):
                imported = stack.enter_context(
                    imported_file(workspace, names, logs, workspace.root / "lineage")
                )
        yield imported

"""Finds the input rows that a row was made from, by their content and not by their place."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.curate.convert import supervised_row
from stillroom.curate.rows import CuratedRow, read_curated_rows
from stillroom.curate.sources import ImportedFile, files_to_import, imported_file
from stillroom.data.checks import Problem
from stillroom.data.formats import task_from_row
from stillroom.data.instruction import Instruction
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines
from stillroom.data.row_names import (
    MAX_CANDIDATES,
    RowNames,
    ambiguous_id_error,
    is_named,
    row_hash,
)
from stillroom.data.words import final_answer
from stillroom.errors import DataError, EngineError
from stillroom.files import content_hash
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
    rewritten_from: Any = None

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
Keys = Iterable[str | None]


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
            raise ambiguous_id_error(self._wanted, places, self._num_rows)
        return self.lines[0] if self.lines else None


def rows_instruction(manifest: Manifest | None) -> Instruction:
    """Returns what an operation put before the conversations of the rows that it wrote."""
    system = manifest.request.get("system") if manifest is not None else None
    return Instruction(system if isinstance(system, str) else None)


@dataclass(frozen=True, slots=True)
class Link:
    """How the rows of a file name the rows of its inputs that they were made from, by keys."""

    what: str
    """What an input row is to a row of the file, such as prompt."""
    of_output: Callable[[Line], Keys]
    """The keys of the input rows behind a row of the file."""
    of_input: Callable[[CuratedRow, str], Keys]
    """The keys of an input row, given with its name."""
    is_same: Callable[[Line, CuratedRow], bool] = lambda _line, _row: True
    """Whether an input row with a key is the one, where old files have keys that several share."""

    def sources(self, file: Path, line: Line) -> Iterator[Match]:
        """Yields the rows of an input that a row of the file was made from."""
        wanted = {*self.of_output(line)} - {None}
        for row, name in named_rows(file):
            if not wanted.isdisjoint(self.of_input(row, name)) and self.is_same(line, row):
                yield file, row.line

    def results(self, file: Path, row: CuratedRow, name: str) -> Iterator[Line]:
        """Yields the rows of the file that were made from an input row."""
        keys = {*self.of_input(row, name)} - {None}
        for line in read_row_lines(file):
            if not keys.isdisjoint(self.of_output(line)):
                yield line


def named_rows(file: Path) -> Iterator[tuple[CuratedRow, str]]:
    """Yields the rows of a file with their names."""
    names = RowNames()
    for row in read_curated_rows(file, with_parts=True):
        yield row, names.name(file, row.line.view)


def links_of(origin: Origin) -> list[Link]:
    """Returns how the rows of a file lead to those of its inputs; nothing if it was given."""
    manifest = origin.manifest
    match manifest.operation if manifest is not None else None:
        case "filter_dataset":
            return [Link("row", _hash_of, lambda _row, name: (name.partition("#")[0],))]
        case "convert_rollouts":
            own = rows_instruction(manifest)
            if manifest is not None and manifest.request.get("rewrite"):
                return [Link("rollout", _rewritten, lambda row, _name: _to_rewrite(row, own))]
            return [Link("rollout", _hash_of, lambda row, _name: _converted_hash(row, own))]
        case "score_rollouts":
            return [Link("rollout", _scored_key, lambda row, _name: _scored_key(row.line))]
        case "make_dpo_pairs":
            own = rows_instruction(manifest)
            return [_pair_link(side, own) for side in ("chosen", "rejected")]
        case "generate_rollouts" | "evaluate_model":
            is_txt, system = origin.path.suffix == ".txt", system_in_ids(manifest)
            return [
                Link(
                    "prompt",
                    lambda line: (_text(ids_of(line.data).task_id),),
                    lambda row, _name: (
                        prompt_task_id(
                            row.line, system, is_text=is_txt or row.path.suffix == ".txt"
                        ),
                    ),
                )
            ]
        case _:
            return []


def _hash_of(line: Line) -> Keys:
    return (row_hash(line.view),)


def _converted_hash(row: CuratedRow, instruction: Instruction) -> Keys:
    if row.facts is None or row.parts is None:
        return ()
    return (row_hash(b"".join(supervised_row(row.facts, row.parts, instruction))),)


def _rewritten(line: Line) -> Keys:
    """Returns a key of a row with a rewritten answer: all but that, and the hash of the first."""
    ids, messages = ids_of(line.data), messages_of(line.data)
    return (content_hash([ids.rollout_id, messages[:-1], ids.rewritten_from]),)


def _to_rewrite(row: CuratedRow, instruction: Instruction) -> Keys:
    """Returns the key that a rollout's row has once its answer is rewritten."""
    if row.facts is None:
        return ()
    messages = instruction.put_before(cast("list[Message]", row.messages))
    original = content_hash(final_answer(row.messages))
    return (content_hash([row.facts.id or None, messages[:-1], original]),)


def _scored_key(line: Line) -> Keys:
    """Returns a key of a rollout that stays when it is scored again."""
    return (content_hash([ids_of(line.data).id, messages_of(line.data)]),)


def _pair_link(side: str, instruction: Instruction) -> Link:
    """Returns how pairs name the rollouts of one side, chosen or rejected."""

    def begins_as(line: Line, row: CuratedRow) -> bool:
        pair = _PAIR.decode(line.data)
        wanted = pair.prompt + (pair.chosen if side == "chosen" else pair.rejected)
        messages = instruction.put_before(cast("list[Message]", row.messages))
        return messages[: len(wanted)] == wanted

    return Link(
        f"{side} rollout",
        lambda line: (_text(getattr(ids_of(line.data), f"{side}_id")),),
        lambda row, name: (name, row.id),
        begins_as,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


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


def messages_of(data: bytes) -> Any:
    """Returns the messages of a rollout in our layout or rnow's; the data if there are none."""
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
    return [file for file in files if files_to_import(workspace, str(file)) is not None]


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

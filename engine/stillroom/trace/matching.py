"""Finds the input rows that a row was made from, by their content, not their line numbers."""

import itertools
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
    matches_name,
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

_IMPORTING_OPERATIONS = ("convert_rollouts", "filter_dataset", "make_dpo_pairs")
_CONVERSATIONS_OF_TABLE = "answered.jsonl"
"""The file of a recipe with the rows of a table as conversations; other files have copied rows."""
MAX_EQUAL_ROWS = 4
"""The largest number of rows with the same content that are listed."""


class RowIds(msgspec.Struct, frozen=True):
    """The ids in rows of Stillroom's formats; a field that a row lacks is None."""

    id: Any = None
    rollout_id: Any = None
    task_id: Any = None
    chosen_id: Any = None
    rejected_id: Any = None
    rewritten_from: Any = None
    metadata: Any = None

    def has(self, query: str) -> bool:
        """Returns whether one of the row's ids, other than the task id, equals the query."""
        return query in (self.id, self.rollout_id, self.chosen_id, self.rejected_id)


class _Pair(msgspec.Struct, frozen=True):
    prompt: list[Any]
    chosen: list[Any]
    rejected: list[Any]


_IDS = msgspec.json.Decoder(RowIds)
_PAIR = msgspec.json.Decoder(_Pair)
Match = tuple[Path, Line]
"""A matching row, and its file."""
Keys = Iterable[str | None]
"""The keys of a row, by which rows of a file and of its inputs are matched."""


def ids_of(data: bytes) -> RowIds:
    """Returns the ids of a row; all of them are None if the line is not a JSON object."""
    try:
        return _IDS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RowIds()


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


def matching_row(file: Path, query: str, shown: str) -> Line | None:
    """Returns the row of a file that matches a row name, a prefix of one, or an id; else None.

    Raises InputError if several rows match; `shown` is the name of the file in that error.
    """
    match, locations, num_rows = None, list[str](), 0
    needle, names = msgspec.json.encode(query)[1:-1], RowNames()
    for rollout in read_curated_rows(file):
        line = rollout.line
        name = names.name(file, line.view)
        has_id = rollout.facts is not None and rollout.facts.id == query
        # Decoding is slow, so lines without the bytes of the query are skipped.
        has_id = has_id or (needle in line.data and ids_of(line.data).has(query))
        if not has_id and not matches_name(query, name):
            continue
        num_rows += 1
        if num_rows <= MAX_CANDIDATES:
            locations.append(f"{name} ({shown}:{line.number})")
        if match is None:
            # The line is copied, because its view would keep a whole block in memory.
            match = msgspec.structs.replace(line, view=line.data)
    if num_rows > 1:
        raise ambiguous_id_error(query, locations, num_rows)
    return match


def rows_instruction(manifest: Manifest | None) -> Instruction:
    """Returns the instruction that an operation put into the rows that it wrote."""
    system = manifest.request.get("system") if manifest is not None else None
    return Instruction(system if isinstance(system, str) else None)


@dataclass(frozen=True, slots=True)
class Link:
    """The functions that match the rows of a file with the rows of its inputs, by keys."""

    kind: str
    """The kind of an input row, such as prompt."""
    output_keys: Callable[[Line], Keys]
    """Returns the keys of the input rows that a row of the file was made from."""
    input_keys: Callable[[CuratedRow, str], Keys]
    """Returns the keys of an input row with this name."""
    is_match: Callable[[Line, CuratedRow], bool] = lambda _line, _row: True
    """Returns whether a row was made from an input row with the same key: keys in files of older
    versions are not unique."""

    def sources(self, file: Path, line: Line) -> Iterator[Match]:
        """Yields the rows of an input that a row of the file was made from."""
        keys = {*self.output_keys(line)} - {None}
        for row, name in named_rows(file):
            if not keys.isdisjoint(self.input_keys(row, name)) and self.is_match(line, row):
                yield file, row.line

    def results(self, file: Path, row: CuratedRow, name: str) -> Iterator[Line]:
        """Yields the rows of the file that were made from an input row."""
        keys = {*self.input_keys(row, name)} - {None}
        for line in read_row_lines(file):
            if not keys.isdisjoint(self.output_keys(line)):
                yield line


def named_rows(file: Path) -> Iterator[tuple[CuratedRow, str]]:
    """Yields the rows of a file with their names."""
    names = RowNames()
    for row in read_curated_rows(file, with_raw_fields=True):
        yield row, names.name(file, row.line.view)


def links_of(origin: Origin) -> list[Link]:
    """Returns the links from a file to its inputs; none for a file without inputs."""
    manifest = origin.manifest
    match manifest.operation if manifest is not None else None:
        case "filter_dataset":
            return [Link("row", _hash_keys, lambda _row, name: (name.partition("#")[0],))]
        case "run_recipe" if origin.path.name != _CONVERSATIONS_OF_TABLE:
            return [
                Link(
                    "row",
                    lambda line: (*_hash_keys(line), *_reworded_keys(line)),
                    lambda row, name: (
                        name.partition("#")[0],
                        _string_or_none(ids_of(row.line.data).rollout_id),
                        row.id,
                    ),
                )
            ]
        case "convert_rollouts":
            added = rows_instruction(manifest)
            if manifest is not None and manifest.request.get("rewrite"):
                return [
                    Link(
                        "rollout",
                        _rewritten_keys,
                        lambda row, _name: _keys_before_rewrite(row, added),
                    )
                ]
            return [Link("rollout", _hash_keys, lambda row, _name: _converted_keys(row, added))]
        case "score_rollouts":
            return [Link("rollout", _scored_keys, lambda row, _name: _scored_keys(row.line))]
        case "make_dpo_pairs":
            added = rows_instruction(manifest)
            return [_pair_link(field, added) for field in ("chosen", "rejected")]
        case "generate_rollouts" | "evaluate_model":
            is_txt, system = origin.path.suffix == ".txt", system_in_ids(manifest)
            return [
                Link(
                    "prompt",
                    lambda line: (_string_or_none(ids_of(line.data).task_id),),
                    lambda row, _name: (
                        prompt_task_id(
                            row.line, system, is_text=is_txt or row.path.suffix == ".txt"
                        ),
                    ),
                )
            ]
        case _:
            return []


def _hash_keys(line: Line) -> Keys:
    """Returns the hash of a row as its key."""
    return (row_hash(line.view),)


def _reworded_keys(line: Line) -> Keys:
    """Yields the ids of the rollouts with the answer and the text of a recipe's reworded row."""
    metadata = ids_of(line.data).metadata
    for name in ("reworded_from", "reworded_by") if isinstance(metadata, dict) else ():
        yield _string_or_none(metadata.get(name))


def _converted_keys(row: CuratedRow, instruction: Instruction) -> Keys:
    """Returns the hash of the row that a rollout is converted to; none if it is not converted."""
    if row.facts is None or row.raw_fields is None:
        return ()
    return (row_hash(b"".join(supervised_row(row.facts, row.raw_fields, instruction))),)


def _rewritten_keys(line: Line) -> Keys:
    """Returns the key of a rewritten row: its id, its prompt, and its original answer's hash."""
    ids, messages = ids_of(line.data), messages_of(line.data)
    return (content_hash([ids.rollout_id, messages[:-1], ids.rewritten_from]),)


def _keys_before_rewrite(row: CuratedRow, instruction: Instruction) -> Keys:
    """Returns the key of a rollout that equals the key of its rewritten row."""
    if row.facts is None:
        return ()
    messages = instruction.apply_to(cast("list[Message]", row.messages))
    original = content_hash(final_answer(row.messages))
    return (content_hash([row.facts.id or None, messages[:-1], original]),)


def _scored_keys(line: Line) -> Keys:
    """Returns a key of a rollout that does not change when the rollout is scored again."""
    return (content_hash([ids_of(line.data).id, messages_of(line.data)]),)


def _pair_link(field: str, instruction: Instruction) -> Link:
    """Returns the link from pairs to their chosen or their rejected rollouts."""

    def starts_with_conversation(line: Line, row: CuratedRow) -> bool:
        pair = _PAIR.decode(line.data)
        conversation = pair.prompt + (pair.chosen if field == "chosen" else pair.rejected)
        messages = instruction.apply_to(cast("list[Message]", row.messages))
        return messages[: len(conversation)] == conversation

    return Link(
        f"{field} rollout",
        lambda line: (_string_or_none(getattr(ids_of(line.data), f"{field}_id")),),
        lambda row, name: (name, row.id),
        starts_with_conversation,
    )


def _string_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def system_in_ids(manifest: Manifest | None) -> str | None:
    """Returns the system message that the task ids of a file of rollouts include.

    Task ids of evaluations do not include it, so that evaluations with and without a system message
    can be compared.
    """
    if manifest is None or manifest.operation != "generate_rollouts":
        return None
    return rows_instruction(manifest).system


def prompt_task_id(line: Line, system: str | None, *, is_text: bool) -> str | None:
    """Returns the task id of a prompt with an added system message; None if it is not a prompt."""
    row = (decode_text_line if is_text else decode_line)(line)
    if isinstance(row, Problem):
        return None
    try:
        return with_system(task_from_row(row), system).task_id
    except (DataError, KeyError, TypeError, AttributeError):
        return None  # The row is not a prompt.


def messages_of(data: bytes) -> Any:
    """Returns a row's `messages`, or its `conversation` (rnow's layout).

    None if it has neither, and `data` itself if it is not a JSON object.
    """
    try:
        row = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    return row.get("messages", row.get("conversation")) if isinstance(row, dict) else data


def first_matches(files: list[Path], find: Callable[[Path], Iterator[Match]]) -> list[Match]:
    """Returns up to MAX_EQUAL_ROWS matches from the first file in which `find` finds a match."""
    for file in files:
        if matches := list(itertools.islice(find(file), MAX_EQUAL_ROWS)):
            return matches
    return []


def inputs_to_import(workspace: Workspace, origin: Origin, files: Iterable[Path]) -> list[Path]:
    """Returns the input files that the operation which wrote a file had to import first."""
    if origin.manifest is None or origin.manifest.operation not in _IMPORTING_OPERATIONS:
        return []
    return [file for file in files if files_to_import(workspace, str(file)) is not None]


@contextmanager
def reimported(workspace: Workspace, logs: Sequence[Path]) -> Generator[ImportedFile | None]:
    """Imports other systems' files again, as the operation that read them did.

    An import of the same files always gives the same rollouts. Yields None if `logs` is empty or
    the import fails.
    """
    with ExitStack() as stack:
        imported = None
        if logs:
            names = [str(file) for file in logs]
            with suppress(EngineError):
                imported = stack.enter_context(
                    imported_file(workspace, names, workspace.root / "lineage")
                )
        yield imported

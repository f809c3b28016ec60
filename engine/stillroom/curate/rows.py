"""Reads the rows of files for curation: their facts, and the bytes of their lines."""

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.facts import (
    Content,
    RawFields,
    RowFacts,
    RowFields,
    count_turns,
    is_plain_rollout,
    is_plain_supervised,
    rollout_facts,
    supervised_facts,
)
from stillroom.data.checks import (
    Problem,
    decode_row,
    decode_with_spare_frames,
    tool_schema_problems,
)
from stillroom.data.layouts.detect import RULES, RolloutLayout, layout_of, stillroom_problems
from stillroom.data.layouts.foreign import prompt_messages
from stillroom.data.row_files import decode_line, read_row_blocks, rollout_files
from stillroom.data.statistics import category_in
from stillroom.errors import DataError
from stillroom.files import canonical_json, content_hash
from stillroom.lineage import AnsweringModel, ModelRecord
from stillroom.lines import Line


class _MessageContent(msgspec.Struct):
    content: Content = None


class _Contents(msgspec.Struct):
    messages: list[_MessageContent]


_FIELDS = msgspec.json.Decoder(RowFields)
_RAW_FIELDS = msgspec.json.Decoder(RawFields)
_CONTENTS = msgspec.json.Decoder(_Contents)
_ROW: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
# Stack frames kept free: more than in decode_row, so that decode_row can decode any written row.
_SPARE_FRAMES = 16
_NULL = b"null"
_MAX_TEACHERS = 20
NO_CATEGORY = "(none)"
"""The category of a row without one."""
OTHERS = "(others)"
"""The name under which all but the largest categories or sources are counted."""
UNREADABLE = "(unreadable)"
"""The category of a row that curation cannot read."""
ACCEPTED_ROWS = (
    "give rollouts from generate_rollouts, or logs, traces and datasets in a format that "
    "import_rollouts reads (`stillroom docs traces` lists them); convert anything else to lines "
    'such as {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", '
    '"content": "4"}]}'
)
"""The fix for rows in an unknown format."""
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class CuratedRow(msgspec.Struct, dict=True):
    """One row of a file, decoded only as far as curation needs it."""

    path: Path
    line: Line
    facts: RowFacts | None = None
    """The fields that filters read; None if curation cannot read the row."""
    problem: str | None = None
    """The reason why curation cannot read the row; None if it can."""
    raw_fields: RawFields | None = None
    """The undecoded fields for training rows; None for supervised rows and unless requested."""
    layout: RolloutLayout | None = None
    """The layout of a rollout; None for supervised rows and unreadable ones."""
    translated: bytes | None = None
    """The row as JSON in Stillroom's layout, if it has another layout; else None."""
    num_tokens: int | None = None
    """The length of the row in tokens, rendered for the student; None until it is counted."""

    @property
    def where(self) -> str:
        """The location of the row as `file:line`."""
        return f"{self.path}:{self.line.number}"

    @property
    def stillroom_json(self) -> bytes:
        """The row as JSON in Stillroom's layout: the bytes of `line`, translated if necessary."""
        return self.translated or self.line.data

    @cached_property
    def fields(self) -> dict[str, Any]:
        """All fields of the row in Stillroom's layout, decoded."""
        return _ROW.decode(self.stillroom_json)

    @property
    def recorded_model(self) -> str | None:
        """The model that answered, according to the rollout; None if it does not record one."""
        teacher = self.fields.get("teacher")
        return teacher.get("model") if isinstance(teacher, dict) else None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the conversation, with all of their fields."""
        return self.fields["messages"]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the tools that were offered to the model."""
        return self.fields.get("tools") or []

    @property
    def id(self) -> str | None:
        """The row's own id; None if it has none."""
        return self.facts.id if self.facts else None

    @cached_property
    def review_id(self) -> str | None:
        """The row's id in reviews that older versions wrote: its own, or a hash of its messages.

        None if the row cannot be read.
        """
        if self.id or self.facts is None:
            return self.id
        try:
            return content_hash(self.messages)
        except (msgspec.DecodeError, RecursionError):
            return None

    @cached_property
    def task_id(self) -> str:
        """The id that all rollouts of a task share: the task id, else a hash of the prompt."""
        if self.facts is not None and self.facts.task_id:
            return self.facts.task_id
        return content_hash(prompt_messages(self.messages))

    def category(self, field: str) -> str:
        """Returns a metadata field as text; "(none)" or "(unreadable)" if there is no value."""
        if self.facts is None:
            return UNREADABLE
        category = category_in(self.facts.metadata or {}, field)
        return NO_CATEGORY if category is None else category


def read_curated_rows(
    path: Path, *, with_raw_fields: bool = False, with_supervised: bool = False
) -> Iterator[CuratedRow]:
    """Yields the rows of a file, or of all files in a folder.

    `with_raw_fields` also sets `raw_fields`, the bytes that go into training rows. With
    `with_supervised`, supervised rows have facts too; otherwise they have a `problem`, like any row
    that is not a rollout.
    """
    decoder = _RowDecoder(with_raw_fields=with_raw_fields, with_supervised=with_supervised)
    for file in rollout_files(path):
        decode = functools.partial(decoder.decode_block, file)
        for lines in read_row_blocks(file):
            yield from decode_with_spare_frames(decode, lines, _SPARE_FRAMES)


class _RowDecoder:
    """Decodes lines: usual ones in one quick pass, all others with a full check of their fields."""

    def __init__(self, *, with_raw_fields: bool, with_supervised: bool) -> None:
        self._with_raw_fields, self._with_supervised = with_raw_fields, with_supervised
        self._valid_tools = b"null"

    def decode_block(self, file: Path, lines: Sequence[Line]) -> list[CuratedRow]:
        return [self._decode(file, line) for line in lines]

    def _decode(self, file: Path, line: Line) -> CuratedRow:
        """Decodes a line quickly if it is a usual one, else with all checks."""
        try:
            if not line.is_cut and (row := self._decode_quickly(file, line)) is not None:
                return row
        except _DECODE_ERRORS:
            pass  # The full check below finds the problem, or reads the row in another layout.
        row = self._decode_with_checks(file, line)
        if row.facts is None and self._with_supervised and not line.is_cut:
            with contextlib.suppress(*_DECODE_ERRORS):
                if (facts := supervised_facts(_FIELDS.decode(line.utf8))) is not None:
                    return CuratedRow(file, line, facts)
        return row

    def _decode_quickly(self, file: Path, line: Line) -> CuratedRow | None:
        """Returns a usual rollout in Stillroom's layout, or supervised row; None for other rows."""
        row = _FIELDS.decode(line.utf8)
        if self._with_supervised and is_plain_supervised(row):
            facts = supervised_facts(row)
            return facts and CuratedRow(file, line, facts)
        num_turns = count_turns(row.messages) if is_plain_rollout(row) else None
        if num_turns is None or not self._are_tools_valid(row.tools):
            return None
        facts = _with_task_id(rollout_facts(row, num_turns), line.data)
        raw_fields = _RAW_FIELDS.decode(line.utf8) if self._with_raw_fields else None
        return CuratedRow(file, line, facts, None, raw_fields, RolloutLayout.STILLROOM)

    def _are_tools_valid(self, tools: msgspec.Raw) -> bool:
        """Returns whether the tool schemas of a row are valid."""
        if tools == _NULL:
            return True
        data = bytes(tools)
        # Most rows of a file have the same tools, so the last valid ones are remembered.
        if data != self._valid_tools:
            if any(tool_schema_problems(msgspec.json.decode(data))):
                return False
            self._valid_tools = data
        return True

    def _decode_with_checks(self, file: Path, line: Line) -> CuratedRow:
        """Decodes all fields of a rollout in any layout and runs all checks, which is slow."""
        try:
            layout, data = _checked_rollout(line)
            _CONTENTS.decode(data)
            row = _FIELDS.decode(data)
            num_turns = [message.role for message in row.messages].count("assistant")
            facts = _with_task_id(rollout_facts(row, num_turns), data)
            raw_fields = _RAW_FIELDS.decode(data) if self._with_raw_fields else None
        except DataError as error:
            return CuratedRow(file, line, problem=error.problem)
        except _DECODE_ERRORS as error:
            return CuratedRow(file, line, problem=str(error))
        translated = None if layout is RolloutLayout.STILLROOM else data
        return CuratedRow(file, line, facts, None, raw_fields, layout, translated)


def _with_task_id(facts: RowFacts, data: bytes) -> RowFacts:
    """Returns the facts with a task_id: the row's own, or else a hash of its prompt."""
    if facts.task_id:
        return facts
    prompt = prompt_messages(_ROW.decode(data)["messages"])
    return msgspec.structs.replace(facts, task_id=content_hash({"messages": prompt}))


def _checked_rollout(line: Line) -> tuple[RolloutLayout, bytes]:
    """Returns the layout of a rollout, and its JSON in Stillroom's layout.

    Raises DataError if the line is not a rollout or has a problem.
    """
    row = decode_line(line)
    if isinstance(row, Problem):
        raise DataError(f"the line {row.message}", row.fix)
    layout = layout_of(row)
    if layout is None:
        raise DataError("the line is not a rollout in a known layout", ACCEPTED_ROWS)
    if layout is RolloutLayout.STILLROOM:
        _raise_first_problem(_serious_problems(row))
        return layout, line.data
    return layout, _translated(row, layout)


def _serious_problems(row: dict[str, Any]) -> Iterator[Problem]:
    """Yields the problems of a rollout in Stillroom's layout that curation does not tolerate.

    It tolerates missing ids and an empty conversation.
    """
    for problem in stillroom_problems(row):
        is_absent = problem.field in ("id", "task_id") and row.get(problem.field) is None
        if not is_absent and not (problem.field == "messages" and row.get("messages") == []):
            yield problem


def _raise_first_problem(problems: Iterator[Problem]) -> None:
    for problem in problems:
        raise DataError(f"{problem.field} {problem.message}".strip(), problem.fix)


def _translated(row: dict[str, Any], layout: RolloutLayout) -> bytes:
    _raise_first_problem(RULES[layout].problems(row))
    return msgspec.json.encode(RULES[layout].to_stillroom(row))


def translate(data: bytes) -> bytes | None:
    """Returns another system's rollout as JSON in Stillroom's layout; None for any other row.

    Raises DataError if the rollout of another system has a problem.
    """
    row = decode_row(data)
    layout = None if isinstance(row, Problem) else layout_of(row)
    if isinstance(row, Problem) or layout is None or layout is RolloutLayout.STILLROOM:
        return None
    return _translated(row, layout)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without the ids of its tool calls, which differ at random."""
    plain = {key: value for key, value in message.items() if key != "tool_call_id"}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [call.get("function") for call in plain["tool_calls"]]
    return plain


def conversation_digest(row: CuratedRow) -> bytes:
    """Returns a digest of the messages without the ids of their tool calls."""
    messages = [without_ids(message) for message in row.messages]
    return hashlib.sha256(canonical_json(messages)).digest()[:16]


def model_records(num_rows: Counter[str]) -> Iterator[ModelRecord]:
    """Yields records of the models that answered rows of other systems, which have no manifest.

    `num_rows` is the number of rows that each model answered.
    """
    for name, rows in num_rows.most_common(_MAX_TEACHERS):
        answering = AnsweringModel(model=name, rows=rows)
        yield ModelRecord(
            role="policy", name=name, location=RolloutLayout.NEMO_GYM.value, answered_by=[answering]
        )

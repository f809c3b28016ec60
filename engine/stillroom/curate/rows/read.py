"""Rollout rows as curation sees them: the few fields that decide, beside the untouched bytes."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stillroom.curate.rows.facts import (
    RolloutFacts,
    chat_of,
    checked_facts,
    layout_of_fields,
    outlined_chat,
    own_facts,
    rnow_facts,
)
from stillroom.curate.rows.fields import (
    NULL,
    CommonFields,
    Content,
    DecodedFields,
    MessageFacts,
    OwnFields,
    RawFields,
    RawShortFields,
    RolloutParts,
    ShortFields,
    TaskPrompt,
)
from stillroom.curate.rows.outline import Outliner, outline
from stillroom.curate.rows.supervised import outlined_facts, supervised_facts
from stillroom.curate.rows.translate import in_our_layout, own_row
from stillroom.data.checks import decode_deeper, tool_schema_problems
from stillroom.data.layouts.detect import RolloutLayout
from stillroom.data.row_files import read_row_blocks, rollout_files
from stillroom.errors import DataError, InputError
from stillroom.files import content_hash
from stillroom.lines import Line
from stillroom.rollout.journal.journal import holds_rollouts

if TYPE_CHECKING:
    from stillroom.curate._outline import Outline


class _Whole(msgspec.Struct):
    messages: list[dict[str, Any]] = []
    conversation: list[dict[str, Any]] = []


class _Saying(msgspec.Struct):
    content: Content = None


class _Contents(msgspec.Struct):
    messages: list[_Saying]


_DECODED = msgspec.json.Decoder(DecodedFields)
_RAW = msgspec.json.Decoder(RawFields)
_SHORT = msgspec.json.Decoder(ShortFields)
_RAW_SHORT = msgspec.json.Decoder(RawShortFields)
_OWN = msgspec.json.Decoder(OwnFields)
_PARTS = msgspec.json.Decoder(RolloutParts)
_MESSAGES: msgspec.json.Decoder[list[MessageFacts] | None] = msgspec.json.Decoder(
    list[MessageFacts] | None
)
_CONTENTS = msgspec.json.Decoder(_Contents)
_NUMBER = msgspec.json.Decoder(float | None)
_OBJECT: msgspec.json.Decoder[dict[str, Any] | None] = msgspec.json.Decoder(dict[str, Any] | None)
_WHOLE = msgspec.json.Decoder(_Whole)
_PROMPT = msgspec.json.Decoder(TaskPrompt)
_STILLROOM, _RNOW = RolloutLayout.STILLROOM, RolloutLayout.RNOW
# More than decode_row has: what is made of a row here is read there.
_SPARE_FRAMES = 16
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class RolloutLine(msgspec.Struct, frozen=True, gc=False):
    """One row of a rollouts file; `facts` is None for what is not a rollout."""

    path: Path
    line: Line
    facts: RolloutFacts | None = None
    problem: str | None = None
    parts: RolloutParts | None = None
    """Of rollouts, where they were asked for."""
    layout: RolloutLayout | None = None
    translated: bytes | None = None
    """The row in our layout, where it had to be made to read it."""

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.path}:{self.line.number}"

    @property
    def own(self) -> bytes:
        """The row in our layout: the very bytes of `line`, unless another system wrote it."""
        if self.translated is not None:
            return self.translated
        other = own_row(self.line.data) if self.layout is RolloutLayout.RNOW else None
        return other or self.line.data

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All of the messages' fields."""
        whole = _WHOLE.decode(self.translated or self.line.data)
        is_theirs = self.layout is RolloutLayout.RNOW and self.translated is None
        return whole.conversation if is_theirs else whole.messages


def read_rollouts(
    path: Path, *, with_parts: bool = False, with_supervised: bool = False
) -> Iterator[RolloutLine]:
    """Yields the rows of a rollouts file, or of all files of a folder, one at a time.

    `with_parts` also gives the bytes that go into training rows; `with_supervised` the facts of
    supervised rows too, as if they were rollouts of no layout.
    """
    reader = _Reader(with_parts=with_parts, with_supervised=with_supervised)
    for file in rollout_files(path):
        read = functools.partial(reader.read, file)
        for lines in read_row_blocks(file):
            yield from decode_deeper(read, lines, _SPARE_FRAMES)


class _Reader:
    """Tells what a line is: in one pass over ours and rnow's, by way of our layout for others."""

    def __init__(
        self, *, with_parts: bool, with_supervised: bool, outline: Outliner = outline
    ) -> None:
        self._with_parts, self._with_supervised = with_parts, with_supervised
        self._outline = outline
        self._sound_tools = b"null"

    def read(self, file: Path, lines: Sequence[Line]) -> list[RolloutLine]:
        return [self._read(file, line) for line in lines]

    def _read(self, file: Path, line: Line) -> RolloutLine:
        try:
            if not line.is_cut:
                at_once = self._with_its_parts if self._with_parts else self._facts_alone
                if (found := at_once(file, line)) is not None:
                    return found
        except _UNREADABLE:
            pass  # the long way tells what is wrong with it, or that it is of another layout
        found = self._the_long_way(file, line)
        if found.facts is None and self._with_supervised and not line.is_cut:
            with contextlib.suppress(*_UNREADABLE):
                if (facts := supervised_facts(line)) is not None:
                    return RolloutLine(file, line, facts)
        return found

    def _facts_alone(self, file: Path, line: Line) -> RolloutLine | None:
        outlined = self._outline(line.view)
        if outlined is not None:
            row = _SHORT.decode(outlined.fields)
            layout, chat = _outlined_layout(row, outlined), outlined_chat(line, outlined)
            if layout is None and self._with_supervised:
                facts = outlined_facts(line, outlined)
                return facts and RolloutLine(file, line, facts)
        else:
            row = _DECODED.decode(line.utf8)
            layout = layout_of_fields(row)
            messages = row.messages if layout is _STILLROOM else row.conversation
            chat = None if messages is None else chat_of(messages)
        if layout is None or chat is None or not self._are_tools_sound(row.tools):
            return None
        if layout is _STILLROOM:
            facts = own_facts(row, chat, row.reward, row.metadata)
        else:
            facts = rnow_facts(row, chat, row.total_reward, row.metadata)
        if facts is None:
            return None
        if facts.task_id is None:
            facts = _with_task_id(facts, line.data)
        return RolloutLine(file, line, facts, None, None, layout)

    def _with_its_parts(self, file: Path, line: Line) -> RolloutLine | None:
        outlined = self._outline(line.view)
        if outlined is not None:
            row = _RAW_SHORT.decode(outlined.fields)
            layout, chat = _outlined_layout(row, outlined), outlined_chat(line, outlined)
            raw_messages = cast("msgspec.Raw", chat.given)  # nobody has decoded it yet
        else:
            row = _RAW.decode(line.utf8)
            layout = layout_of_fields(row)
            raw_messages = row.messages if layout is _STILLROOM else row.conversation
            messages = _MESSAGES.decode(raw_messages)
            chat = None if messages is None else chat_of(messages)
        if layout is None or chat is None or not self._are_tools_sound(row.tools):
            return None
        is_own = layout is _STILLROOM
        raw_reward = row.reward if is_own else row.total_reward
        reward, metadata = _NUMBER.decode(raw_reward), _OBJECT.decode(row.metadata)
        as_facts = own_facts if is_own else rnow_facts
        facts = as_facts(row, chat, reward, metadata)
        if facts is None:
            return None
        if facts.task_id is None:
            facts = _with_task_id(facts, line.data)
        raw_reward = NULL if facts.reward is None else raw_reward
        parts = RolloutParts(raw_messages, row.tools, row.metadata, raw_reward)
        return RolloutLine(file, line, facts, None, parts, layout)

    def _are_tools_sound(self, tools: msgspec.Raw) -> bool:
        if tools is NULL:
            return True
        given = bytes(tools)
        # Most rows of a file have the same tools.
        if given != self._sound_tools:
            if any(tool_schema_problems(msgspec.json.decode(given))):
                return False
            self._sound_tools = given
        return True

    def _the_long_way(self, file: Path, line: Line) -> RolloutLine:
        try:
            layout, own = in_our_layout(line)
            _CONTENTS.decode(own)
            facts = _with_task_id(checked_facts(_OWN.decode(own)), own)
            parts = _PARTS.decode(own) if self._with_parts else None
        except DataError as error:
            return RolloutLine(file, line, problem=error.problem)
        except _UNREADABLE as error:
            return RolloutLine(file, line, problem=str(error))
        translated = None if layout is RolloutLayout.STILLROOM else own
        return RolloutLine(file, line, facts, None, parts, layout, translated)


def _outlined_layout(row: CommonFields, outlined: "Outline") -> RolloutLayout | None:
    layout = layout_of_fields(row)
    return layout if outlined.is_conversation is (layout is _RNOW) else None


def _with_task_id(facts: RolloutFacts, data: bytes) -> RolloutFacts:
    """Returns the facts with the hash of the prompt for a task_id that the row lacks."""
    if facts.task_id:
        return facts
    roles = [message.role for message in facts.messages]
    count = roles.index("assistant") if "assistant" in roles else len(roles)
    row = _PROMPT.decode(data)
    given = [msgspec.json.decode(raw) for raw in (row.messages or row.conversation)[:count]]
    return msgspec.structs.replace(facts, task_id=content_hash({"messages": given}))


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Returns what a message says, without the ids of its tool calls, which differ by chance."""
    plain = {key: value for key, value in message.items() if key != "tool_call_id"}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [call.get("function") for call in plain["tool_calls"]]
    return plain


def check_output(output: Path, sources: Sequence[Path]) -> None:
    """Raises InputError if writing the output would replace rollouts, which cost money to make."""
    if output.resolve() in {file.resolve() for path in sources for file in rollout_files(path)}:
        raise InputError(f"the output {output} is the input itself", "choose another output")
    if holds_rollouts(output):
        raise InputError(
            f"the output {output} holds rollouts that generate_rollouts wrote",
            "choose another output; delete the file yourself if it is not needed any more",
        )

"""Reads a student's rollout with the teacher's tokenizer, for comparison byte by byte."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import ModelError
from stillroom.models.batches import TokenSequence
from stillroom.models.reread.byte_units import (
    Choices,
    Places,
    ReadingSide,
    Unit,
    WrittenParts,
    is_whole_call,
    turn_units,
)
from stillroom.models.reread.token_bytes import ByteTrie, TokenBytes, encode
from stillroom.models.reread.turns import Kind, TurnParts, read_turn, texts_between, turn_marks
from stillroom.types import Message, TokenTrace, ToolSchema


@dataclass(frozen=True, slots=True)
class ByteReading:
    """A rollout in the teacher's tokens, and the positions at which both models are compared."""

    tokens: TokenSequence
    """The rollout in the teacher's tokens; those of the student's turns count as trained."""
    units: list[Unit]
    """The positions of comparison. Student tokens are indices among the sampled tokens, teacher
    tokens among the trained ones of `tokens`."""
    pair: "ReadingPair"
    choices: Choices
    """The choices that the units refer to by index."""
    num_bytes: int
    """The bytes that the student sampled, without the text of its template."""
    num_compared: int
    """The bytes among them that are compared."""
    num_left_out: int
    """The sampled tokens without any comparison."""

    def of_tokens(self, kept: Sequence[int]) -> "ByteReading":
        """Returns the reading with the comparisons at `kept` sampled tokens only, renumbered."""
        place = {token: number for number, token in enumerate(kept)}
        units = [
            unit._replace(student_token=place[unit.student_token])
            for unit in self.units
            if unit.student_token in place
        ]
        return replace(self, units=units)


@dataclass(frozen=True, slots=True)
class _TeacherTurn:
    """One turn in the teacher's text, and where its parts begin."""

    text: str
    starts: list[int]


@dataclass(frozen=True, slots=True)
class Reader:
    """One of the two models: its name, tokenizer and template."""

    name: str
    """The name in errors."""
    tokenizer: Any
    renderer: ChatRenderer
    stop_ids: frozenset[int]

    def side(self, tokens: TokenBytes, tools: Sequence[ToolSchema]) -> ReadingSide:
        """Returns the tokenizer with its template's markers, with or without tools."""
        marks = turn_marks(self.renderer, tools, self.name)
        return ReadingSide(self.tokenizer, tokens, marks, self.stop_ids)


class ReadingPair:
    """A student and a teacher whose tokenizers or chat templates differ."""

    def __init__(
        self,
        student: "Reader",
        teacher: "Reader",
        *,
        max_context: int,
    ) -> None:
        """max_context: the maximum number of tokens that the teacher can read.

        Raises ModelError, with a fix, for a tokenizer whose tokens' bytes are not known.
        """
        self.student, self.teacher, self.max_context = student, teacher, max_context
        self._bytes = [TokenBytes.of(one.tokenizer, one.name) for one in (student, teacher)]
        self.student_trie, self.teacher_trie = (ByteTrie(tokens) for tokens in self._bytes)
        self._choices: dict[bool, Choices] = {}

    def choices(self, tools: Sequence[ToolSchema]) -> Choices:
        """Returns the choices for conversations with or without tools."""
        key = bool(tools)
        if key not in self._choices:
            sides = [
                ReadingSide(
                    one.tokenizer, tokens, turn_marks(one.renderer, tools, one.name), one.stop_ids
                )
                for one, tokens in zip((self.student, self.teacher), self._bytes, strict=True)
            ]
            self._choices[key] = Choices(sides[0], sides[1])
        return self._choices[key]

    def read(
        self,
        trace: TokenTrace,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        num_turns: int,
    ) -> ByteReading:
        """Returns a finished rollout as the teacher reads it; its last `num_turns` were sampled.

        The reading ends before the first turn that the teacher's template cannot render.
        """
        return _Rollout(self, trace, messages, tools).read(num_turns)


class _Rollout:
    """Reads one rollout, turn by turn."""

    def __init__(
        self,
        pair: ReadingPair,
        trace: TokenTrace,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> None:
        self._pair, self._trace, self._messages, self._tools = pair, trace, messages, tools
        self._choices, self._renderer = pair.choices(tools), pair.teacher.renderer
        self._ids: list[int] = []
        self._is_turn: list[bool] = []
        self._units: list[Unit] = []
        self._num_bytes = 0

    def read(self, num_turns: int) -> ByteReading:
        spans = sampled_spans(self._trace)
        turns = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]
        # A last turn with no tokens left by the curriculum has no span.
        turns = turns[len(turns) - num_turns :][: len(spans)]
        if turns:
            self._add(self._renderer.prompt_ids(self._messages[: turns[0]], self._tools))
        num_sampled = 0
        for number, ((start, end), index) in enumerate(zip(spans, turns, strict=False)):
            ids = self._trace.ids[start:end]
            text = self._turn(ids, self._messages[index], num_sampled)
            num_sampled += len(ids)
            following = turns[number + 1] if number + 1 < len(turns) else None
            if text is None or following is None:
                break
            replies = self._messages[index + 1 : following]
            try:
                between = self._renderer.reply_text(self._messages[index], replies, self._tools)
            except ModelError:
                break
            self._add(encode(self._choices.teacher.tokenizer, between))
        return self._reading()

    def _add(self, ids: Sequence[int], *, is_turn: bool = False) -> None:
        self._ids += ids
        self._is_turn += [is_turn] * len(ids)

    def _turn(self, ids: Sequence[int], message: Message, num_before: int) -> str | None:
        """Adds a turn and returns the teacher's text, or None if its template cannot render it."""
        student, teacher = self._choices.student, self._choices.teacher
        text = student.tokens.text(ids)
        has_end = ids[-1] in student.stop_ids
        end = student.tokens.of_token[ids[-1]] if has_end else b""
        if message.get("tool_calls") and not student.marks.has_calls:
            # The student's own template writes calls in a form that cannot be parsed.
            self._num_bytes += len(text) - len(end)
            return None
        read = read_turn(text, student.marks, has_calls=bool(message.get("tool_calls")), end=end)
        self._num_bytes += sum(len(part.text) for part in read.parts) + len(read.rest)
        shown = render_turn(
            teacher, read, has_end=has_end, closing=self._choices.closing("arguments")
        )
        if shown is None:
            return None
        teacher_ids = encode(teacher.tokenizer, shown.text)
        if len(self._ids) + len(teacher_ids) > self._pair.max_context:
            return None
        num_turn_tokens = sum(self._is_turn)
        self._add(teacher_ids, is_turn=True)
        if teacher.tokens.text(teacher_ids) == shown.text.encode():
            units = turn_units(
                self._choices,
                read.parts,
                WrittenParts(Places(student, ids), read.starts),
                WrittenParts(Places(teacher, teacher_ids), shown.starts),
                is_ended=read.is_ended,
            )
            self._units += [
                unit._replace(
                    student_token=unit.student_token + num_before,
                    teacher_token=unit.teacher_token + num_turn_tokens,
                )
                for unit in units
            ]
        return shown.text

    def _reading(self) -> ByteReading:
        num_sampled = sum(self._trace.sampled)
        compared = {unit.student_token for unit in self._units}
        # Nothing after the last turn is read: a prompt alone may be longer than the context.
        end = max((i for i, is_turn in enumerate(self._is_turn) if is_turn), default=0) + 1
        return ByteReading(
            TokenSequence(self._ids[:end], self._is_turn[:end]),
            self._units,
            self._pair,
            self._choices,
            self._num_bytes,
            sum(0 <= unit.symbol < 256 for unit in self._units),
            num_sampled - len(compared),
        )


def render_turn(
    teacher: ReadingSide, read: TurnParts, *, has_end: bool, closing: str = ""
) -> _TeacherTurn | None:
    """Returns a turn in the teacher's text; None if its template cannot render it.

    The student's text is kept verbatim, even where it is malformed.
    closing: the text that the teacher's template always writes after a call.
    """
    text, starts = "", list[int]()
    before: Kind = "start"
    for part in read.parts:
        mark = texts_between(teacher.marks, before).get(part.kind)
        if mark is None:
            return None
        text += mark
        starts.append(len(text.encode()))
        text += part.text.decode()
        before = part.kind
    ends: Mapping[Kind, str] = texts_between(teacher.marks, before)
    if read.is_ended:
        if "end" not in ends:
            return None
        return _TeacherTurn(text + ends["end"], starts)
    if read.rest and read.parts and is_whole_call(read.parts[-1]):
        text += closing
    text += read.rest.decode(errors="replace")
    return _TeacherTurn(text + (teacher.marks.end_text if has_end else ""), starts)


def sampled_spans(trace: TokenTrace) -> list[tuple[int, int]]:
    """Returns the start and end of each run of sampled tokens, one for each turn."""
    spans: list[tuple[int, int]] = []
    for index, is_sampled in enumerate(trace.sampled):
        if is_sampled and spans and spans[-1][1] == index:
            spans[-1] = spans[-1][0], index + 1
        elif is_sampled:
            spans.append((index, index + 1))
    return spans

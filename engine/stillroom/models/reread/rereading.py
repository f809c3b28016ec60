"""Reads a student's rollout with the teacher's tokenizer, for comparison byte by byte."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import ModelError
from stillroom.models.batches import TokenSequence
from stillroom.models.reread.comparison_points import (
    ComparisonPoint,
    SymbolSets,
    TokenOffsets,
    TurnFormat,
    WrittenParts,
    is_complete_call,
    turn_points,
)
from stillroom.models.reread.token_bytes import ByteTrie, TokenBytes, encode
from stillroom.models.reread.turns import (
    PartKind,
    TurnParts,
    parse_turn,
    texts_between,
    turn_markers,
)
from stillroom.types import Message, TokenTrace, ToolSchema


@dataclass(frozen=True, slots=True)
class ByteReading:
    """A rollout in the teacher's tokens, and the points at which the models are compared."""

    tokens: TokenSequence
    """The rollout in the teacher's tokens; those of the student's turns count as trained."""
    points: list[ComparisonPoint]
    """The points at which the models are compared. Student tokens are numbered among the sampled
    tokens, teacher tokens among the trained ones of `tokens`."""
    pair: "ReadingPair"
    symbol_sets: SymbolSets
    """The symbol sets that the points refer to by index."""
    num_bytes: int
    """The number of bytes that the student sampled, without markers."""
    num_compared_bytes: int
    """The number of these bytes that are compared."""
    num_uncompared_tokens: int
    """The number of sampled tokens without any comparison point."""

    def keep_tokens(self, kept: Sequence[int]) -> "ByteReading":
        """Returns the reading with only the points in the sampled tokens `kept`, renumbered."""
        new_index = {token: index for index, token in enumerate(kept)}
        points = [
            point._replace(student_token=new_index[point.student_token])
            for point in self.points
            if point.student_token in new_index
        ]
        return replace(self, points=points)


@dataclass(frozen=True, slots=True)
class _TeacherTurn:
    """One turn in the teacher's text, and where its parts begin."""

    text: str
    starts: list[int]


@dataclass(frozen=True, slots=True)
class Reader:
    """One of the two models: its name, tokenizer, chat template and stop tokens."""

    name: str
    """The name in errors."""
    tokenizer: Any
    renderer: ChatRenderer
    stop_ids: frozenset[int]


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

        Raises ModelError for a tokenizer whose tokens' bytes are not known.
        """
        self.student, self.teacher, self.max_context = student, teacher, max_context
        self._bytes = [
            TokenBytes.from_tokenizer(reader.tokenizer, reader.name)
            for reader in (student, teacher)
        ]
        self.student_trie, self.teacher_trie = (ByteTrie(tokens) for tokens in self._bytes)
        self._symbol_sets: dict[bool, SymbolSets] = {}

    def symbol_sets(self, tools: Sequence[ToolSchema]) -> SymbolSets:
        """Returns the symbol sets for conversations with or without tools."""
        key = bool(tools)
        if key not in self._symbol_sets:
            formats = [
                TurnFormat(
                    reader.tokenizer,
                    tokens,
                    turn_markers(reader.renderer, tools, reader.name),
                    reader.stop_ids,
                )
                for reader, tokens in zip((self.student, self.teacher), self._bytes, strict=True)
            ]
            self._symbol_sets[key] = SymbolSets(formats[0], formats[1])
        return self._symbol_sets[key]

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
        return _RolloutReader(self, trace, messages, tools).read(num_turns)


class _RolloutReader:
    """Reads one rollout as the teacher would, turn by turn."""

    def __init__(
        self,
        pair: ReadingPair,
        trace: TokenTrace,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> None:
        self._pair, self._trace, self._messages, self._tools = pair, trace, messages, tools
        self._symbol_sets, self._renderer = pair.symbol_sets(tools), pair.teacher.renderer
        self._ids: list[int] = []
        self._is_turn: list[bool] = []
        self._points: list[ComparisonPoint] = []
        self._num_bytes = 0

    def read(self, num_turns: int) -> ByteReading:
        """Returns the reading of the last `num_turns` turns; see `ReadingPair.read`."""
        spans = sampled_spans(self._trace)
        turns = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]
        # The curriculum may have removed all tokens of the last turn, which then has no span.
        turns = turns[len(turns) - num_turns :][: len(spans)]
        if turns:
            self._add(self._renderer.prompt_ids(self._messages[: turns[0]], self._tools))
        num_sampled = 0
        for number, ((start, end), index) in enumerate(zip(spans, turns, strict=False)):
            ids = self._trace.ids[start:end]
            text = self._add_turn(ids, self._messages[index], num_sampled)
            num_sampled += len(ids)
            following = turns[number + 1] if number + 1 < len(turns) else None
            if text is None or following is None:
                break
            replies = self._messages[index + 1 : following]
            try:
                between = self._renderer.reply_text(self._messages[index], replies, self._tools)
            except ModelError:
                break
            self._add(encode(self._symbol_sets.teacher.tokenizer, between))
        return self._build_reading()

    def _add(self, ids: Sequence[int], *, is_turn: bool = False) -> None:
        self._ids += ids
        self._is_turn += [is_turn] * len(ids)

    def _add_turn(self, ids: Sequence[int], message: Message, num_before: int) -> str | None:
        """Adds a turn; returns its text in the teacher's template, or None if that can't render."""
        student, teacher = self._symbol_sets.student, self._symbol_sets.teacher
        text = student.tokens.text(ids)
        has_end = ids[-1] in student.stop_ids
        end = student.tokens.by_id[ids[-1]] if has_end else b""
        if message.get("tool_calls") and not student.markers.supports_calls:
            # The student's own template writes calls in a form that cannot be parsed.
            self._num_bytes += len(text) - len(end)
            return None
        turn = parse_turn(text, student.markers, has_calls=bool(message.get("tool_calls")), end=end)
        self._num_bytes += sum(len(part.text) for part in turn.parts) + len(turn.unparsed)
        rendered = render_turn(
            teacher, turn, has_end=has_end, closing=self._symbol_sets.closing("arguments")
        )
        if rendered is None:
            return None
        teacher_ids = encode(teacher.tokenizer, rendered.text)
        if len(self._ids) + len(teacher_ids) > self._pair.max_context:
            return None
        num_turn_tokens = sum(self._is_turn)
        self._add(teacher_ids, is_turn=True)
        if teacher.tokens.text(teacher_ids) == rendered.text.encode():
            points = turn_points(
                self._symbol_sets,
                turn.parts,
                WrittenParts(TokenOffsets(student, ids), turn.starts),
                WrittenParts(TokenOffsets(teacher, teacher_ids), rendered.starts),
                is_ended=turn.is_ended,
            )
            self._points += [
                point._replace(
                    student_token=point.student_token + num_before,
                    teacher_token=point.teacher_token + num_turn_tokens,
                )
                for point in points
            ]
        return rendered.text

    def _build_reading(self) -> ByteReading:
        """Returns the reading of the turns that were added."""
        num_sampled = sum(self._trace.sampled)
        compared = {point.student_token for point in self._points}
        # Nothing after the last turn is read: a prompt alone may be longer than the context.
        end = max((i for i, is_turn in enumerate(self._is_turn) if is_turn), default=0) + 1
        return ByteReading(
            TokenSequence(self._ids[:end], self._is_turn[:end]),
            self._points,
            self._pair,
            self._symbol_sets,
            self._num_bytes,
            sum(0 <= point.symbol < 256 for point in self._points),
            num_sampled - len(compared),
        )


def render_turn(
    teacher: TurnFormat, turn: TurnParts, *, has_end: bool, closing: str = ""
) -> _TeacherTurn | None:
    """Renders a turn in the teacher's template; returns None if the template cannot.

    The student's text is kept verbatim, even where it is malformed.
    closing: the text that the teacher's template always writes after a call.
    """
    text, starts = "", list[int]()
    before: PartKind = "start"
    for part in turn.parts:
        marker = texts_between(teacher.markers, before).get(part.kind)
        if marker is None:
            return None
        text += marker
        starts.append(len(text.encode()))
        text += part.text.decode()
        before = part.kind
    ends: Mapping[PartKind, str] = texts_between(teacher.markers, before)
    if turn.is_ended:
        if "end" not in ends:
            return None
        return _TeacherTurn(text + ends["end"], starts)
    if turn.unparsed and turn.parts and is_complete_call(turn.parts[-1]):
        text += closing
    text += turn.unparsed.decode(errors="replace")
    return _TeacherTurn(text + (teacher.markers.end_text if has_end else ""), starts)


def sampled_spans(trace: TokenTrace) -> list[tuple[int, int]]:
    """Returns the start and end of each run of sampled tokens, one for each turn."""
    spans: list[tuple[int, int]] = []
    for index, is_sampled in enumerate(trace.sampled):
        if is_sampled and spans and spans[-1][1] == index:
            spans[-1] = spans[-1][0], index + 1
        elif is_sampled:
            spans.append((index, index + 1))
    return spans

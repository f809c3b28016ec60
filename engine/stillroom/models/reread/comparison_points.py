"""The positions of a turn at which two models are compared byte by byte, and their symbols.

A comparison point is a position at which both models predict what comes next: the next byte, or a
marker of the template (a call's opening, the end of the turn). It may be at the start of a token or
inside one; inside a token a model's probabilities are those of the tokens that begin with the same
bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stillroom.models.reread.token_bytes import TokenBytes, encode
from stillroom.models.reread.turns import (
    PartKind,
    TurnMarkers,
    TurnPart,
    common_prefix,
    json_object_end,
    texts_between,
)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A marker as one symbol: the tokens and the bytes that begin it in each model's text.

    A byte that begins a marker for one model only, and is not text, is ignored for the other;
    whitespace that may also be text counts as the symbol for both.
    """

    student_ids: tuple[int, ...] = ()
    teacher_ids: tuple[int, ...] = ()
    student_bytes: tuple[int, ...] = ()
    teacher_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SymbolSet:
    """The symbols that are distinguished at a comparison point; all others count as one."""

    symbols: tuple[Symbol, ...]
    has_bytes: bool = True
    """Whether each next byte is a symbol of its own."""
    is_conditional: bool = False
    """Whether probabilities are conditional on content, which an earlier point has chosen."""
    symbol_by_kind: Mapping[PartKind, int] = field(default_factory=dict[PartKind, int])
    """256 plus the index of the symbol that begins the next part, by that part's kind."""


class ComparisonPoint(NamedTuple):
    """A position at which both models' predictions are compared."""

    student_token: int
    """The index of the token that holds the position; in `ByteReading` among all sampled tokens."""
    student_prefix: bytes
    """The bytes of the student's token before the position."""
    teacher_token: int
    teacher_prefix: bytes
    """The bytes of the teacher's token before the position."""
    teacher_before: bytes
    """The teacher's previous token, if the position is at its end and it might be longer."""
    symbol_set: int
    """The index of its symbol set in `SymbolSets.sets`."""
    symbol: int
    """The sampled byte, or 256 plus the index of a symbol of the set; -1 for neither."""


class TurnFormat(NamedTuple):
    """How one model writes turns: its tokenizer, and the markers of its chat template."""

    tokenizer: Any
    tokens: TokenBytes
    markers: TurnMarkers
    stop_ids: frozenset[int]


@dataclass(slots=True)
class SymbolSets:
    """The symbol sets of a pair of models, created when they are first needed."""

    student: TurnFormat
    teacher: TurnFormat
    sets: list[SymbolSet] = field(default_factory=list[SymbolSet])
    _index: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def within(self, kind: PartKind, text: bytes = b"") -> int:
        """Returns the index of the symbol set inside a part, or right after its last byte.

        text: the part so far; if it ends in whitespace, a marker may have begun with that.
        """
        return self._set_index("blank" if text[-1:].isspace() else "within", kind)

    def after(self, kind: PartKind) -> "LeadAndSymbols | None":
        """Returns the symbol set of what follows a part, after the text that always follows.

        None if no part can follow in both models' formats.
        """
        texts = self._texts(kind)
        if not texts[0]:
            return None
        student, teacher = (
            common_lead(turn_format, following)
            for turn_format, following in zip((self.student, self.teacher), texts, strict=True)
        )
        return LeadAndSymbols(
            len(student.encode()), len(teacher.encode()), self._set_index("after", kind)
        )

    def closing(self, kind: PartKind) -> str:
        """Returns the text that the teacher's template always writes after a part."""
        return common_lead(self.teacher, self._texts(kind)[1])

    def at_first_byte(self, kind: PartKind, before: PartKind) -> int:
        """Returns the index of the symbol set at the first byte of a part."""
        if kind != "text" or before not in ("start", "thought"):
            return self.within(kind)
        if self.text_may_follow(before):
            return self._set_index("after", before)
        return self._set_index("bytes", "text")

    def text_may_follow(self, kind: PartKind) -> bool:
        """Returns whether neither model's format has a marker between a part and content."""
        texts = self._texts(kind)
        pairs = zip((self.student, self.teacher), texts, strict=True)
        return all(
            "text" in following and following["text"] == common_lead(turn_format, following)
            for turn_format, following in pairs
        )

    def _texts(self, kind: PartKind) -> tuple[dict[PartKind, str], dict[PartKind, str]]:
        """Returns each template's text before every kind of part that may follow in both."""
        student, teacher = (
            texts_between(turn_format.markers, kind) for turn_format in (self.student, self.teacher)
        )
        both = student.keys() & teacher.keys()
        return {k: t for k, t in student.items() if k in both}, {
            k: t for k, t in teacher.items() if k in both
        }

    def _set_index(self, position: str, kind: PartKind) -> int:
        """Returns the index of the symbol set for a position in or after a part; see `_build`."""
        key = (position, kind)
        if key not in self._index:
            self._index[key] = len(self.sets)
            self.sets.append(self._build(position, kind))
        return self._index[key]

    def _build(self, position: str, kind: PartKind) -> SymbolSet:
        """Returns the symbol set for a position in or after a part.

        position: `within` the part; `blank`, within it after whitespace; `after` the part and its
        fixed text; or `bytes`, at the first byte of content after a marker.
        """
        if position == "bytes":
            return SymbolSet((), is_conditional=True)
        if position != "after" and kind == "arguments":
            # Arguments end at their last brace, so no marker can follow one of their bytes.
            return SymbolSet(())
        student, teacher = self._texts(kind)
        if position == "after":
            student = _without_lead(self.student, student)
            teacher = _without_lead(self.teacher, teacher)
        has_bytes = position != "after" or self.text_may_follow(kind)
        is_text = has_bytes and kind in ("start", "text", "thought")
        starts: dict[PartKind, Symbol] = {}
        for following in sorted(student):
            if student[following] and teacher[following]:
                is_end = following == "end"
                starts[following] = _build_symbol(
                    _marker_start(self.student, student[following], is_end=is_end),
                    _marker_start(self.teacher, teacher[following], is_end=is_end),
                    is_text=is_text,
                    is_after_blank=position == "blank",
                )
        symbols = _merge(list(starts.values()))
        symbol_by_kind: dict[PartKind, int] = {
            following: 256 + index
            for following, start in starts.items()
            for index, symbol in enumerate(symbols)
            if _overlap(start, symbol)
        }
        return SymbolSet(symbols, has_bytes=has_bytes, symbol_by_kind=symbol_by_kind)

    def symbol_of(self, symbol_set: int, following: PartKind) -> int:
        """Returns 256 plus the index of the symbol that begins the next part; -1 if none does."""
        return self.sets[symbol_set].symbol_by_kind.get(following, -1)


class LeadAndSymbols(NamedTuple):
    """A symbol set, and the number of bytes that each template always writes before it."""

    student_lead: int
    teacher_lead: int
    symbol_set: int


def common_lead(turn_format: TurnFormat, texts: Mapping[PartKind, str]) -> str:
    """Returns the text that a template writes in any case, whichever part follows.

    texts: the template's text before each kind of part that may follow. If only one kind may, this
    is its text up to the first marker.
    """
    if len(texts) != 1:
        return common_prefix(*texts.values())
    [text] = texts.values()
    before = b""
    for token in encode(turn_format.tokenizer, text):
        if token in turn_format.tokens.marker_ids:
            return before.decode()
        before += turn_format.tokens.by_id[token]
    return text


def _without_lead(turn_format: TurnFormat, texts: Mapping[PartKind, str]) -> dict[PartKind, str]:
    """Returns the texts after their common lead, by the kind of the part that follows."""
    return {kind: text[len(common_lead(turn_format, texts)) :] for kind, text in texts.items()}


class _MarkerStart(NamedTuple):
    """How a marker begins for one model: a token, whitespace and a token, or a byte of text."""

    ids: tuple[int, ...]
    blank: int | None = None
    byte: int | None = None


def _marker_start(turn_format: TurnFormat, text: str, *, is_end: bool) -> _MarkerStart:
    """Returns how the marker `text` begins; `is_end`: whether the marker ends the turn."""
    first = encode(turn_format.tokenizer, text.lstrip() or text)[0]
    if first not in turn_format.tokens.marker_ids:
        return _MarkerStart((), byte=text.encode()[0])
    ends = turn_format.stop_ids & turn_format.tokens.marker_ids if is_end else frozenset[int]()
    blank = text.encode()[0] if text[0].isspace() else None
    return _MarkerStart(tuple(sorted({first, *ends})), blank)


def _build_symbol(
    student: _MarkerStart, teacher: _MarkerStart, *, is_text: bool, is_after_blank: bool
) -> Symbol:
    """Returns the symbol of a marker from its start in each model's text.

    is_text: whether text may continue here, so that whitespace may be text or begin the marker.
    """
    if student.byte is not None or teacher.byte is not None or not is_text:
        bytes_ = [
            tuple(byte for byte in (start.blank, start.byte) if byte is not None)
            for start in (student, teacher)
        ]
        return Symbol(student.ids, teacher.ids, *bytes_)
    blanks = tuple(sorted({blank for blank in (student.blank, teacher.blank) if blank is not None}))
    if is_after_blank or student.blank == teacher.blank:
        # The whitespace has been written, or is the same byte for both.
        blanks = ()
    return Symbol(student.ids, teacher.ids, blanks, blanks)


def _merge(symbols: Sequence[Symbol]) -> tuple[Symbol, ...]:
    """Returns the symbols, merging those that begin with the same token or byte for a model."""
    merged: list[Symbol] = []
    for symbol in symbols:
        merged_symbol = symbol
        for other in list(merged):
            if _overlap(merged_symbol, other):
                merged.remove(other)
                merged_symbol = Symbol(
                    *(
                        tuple(sorted({*a, *b}))
                        for a, b in zip(
                            _start_fields(merged_symbol), _start_fields(other), strict=True
                        )
                    )
                )
        merged.append(merged_symbol)
    return tuple(merged)


def _overlap(left: Symbol, right: Symbol) -> bool:
    """Whether two symbols begin with the same token or byte for one of the models."""
    pairs = zip(_start_fields(left), _start_fields(right), strict=True)
    return any(set(a) & set(b) for a, b in pairs)


def _start_fields(symbol: Symbol) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens and bytes that begin a symbol, in the order of the fields."""
    return symbol.student_ids, symbol.teacher_ids, symbol.student_bytes, symbol.teacher_bytes


def is_complete_call(part: TurnPart) -> bool:
    """Whether a part is the complete arguments of a call, a JSON object."""
    if part.kind != "arguments":
        return False
    text = part.text.decode()
    return json_object_end(text) == len(text)


class TokenOffsets:
    """Looks up a turn's tokens, for one model, by byte offset."""

    def __init__(self, turn_format: TurnFormat, ids: Sequence[int]) -> None:
        self._words = [turn_format.tokens.by_id[token] for token in ids]
        self._is_marker = [token in turn_format.tokens.marker_ids for token in ids]
        # For each byte of the turn: the index of its token, and its offset in the token.
        self._by_byte: list[tuple[int, int]] = [
            (index, offset) for index, word in enumerate(self._words) for offset in range(len(word))
        ]

    def token_at(self, byte: int) -> tuple[int, bytes] | None:
        """Returns the index of the token that holds a byte, and the token's bytes before it.

        None beyond the turn, and inside a marker.
        """
        if not 0 <= byte < len(self._by_byte):
            return None
        index, offset = self._by_byte[byte]
        if offset and self._is_marker[index]:
            return None
        return index, self._words[index][:offset]

    def previous_text(self, index: int, prefix: bytes) -> bytes:
        """Returns the bytes of the previous token; empty inside a token and after a marker."""
        is_text = not prefix and index > 0 and not self._is_marker[index - 1]
        return self._words[index - 1] if is_text else b""


class WrittenParts(NamedTuple):
    """A turn's tokens for one model, and the byte offset at which each part starts."""

    tokens: TokenOffsets
    starts: Sequence[int]


def turn_points(
    symbol_sets: SymbolSets,
    parts: Sequence[TurnPart],
    student: WrittenParts,
    teacher: WrittenParts,
    *,
    is_ended: bool,
) -> list[ComparisonPoint]:
    """Returns the comparison points of a turn, in order; both models share its `parts`."""
    points: list[ComparisonPoint] = []

    def add(student_byte: int, teacher_byte: int, symbol_set: int, symbol: int) -> None:
        """Adds a comparison point at these bytes of the two texts, unless one is in a marker."""
        in_student = student.tokens.token_at(student_byte)
        in_teacher = teacher.tokens.token_at(teacher_byte)
        if in_student is not None and in_teacher is not None:
            before = teacher.tokens.previous_text(*in_teacher)
            points.append(ComparisonPoint(*in_student, *in_teacher, before, symbol_set, symbol))

    def end_part(
        before: TurnPart | None, following: PartKind | None, offsets: tuple[int, int]
    ) -> None:
        """Adds the positions that decide whether a part ends and what follows it."""
        kind: PartKind = before.kind if before is not None else "start"
        is_call = before is not None and is_complete_call(before)
        if before is not None and not is_call:
            symbol_set = symbol_sets.within(kind, before.text)
            add(
                *offsets,
                symbol_set,
                symbol_sets.symbol_of(symbol_set, following) if following else -1,
            )
        following_symbols = symbol_sets.after(kind) if kind not in ("text", "name") else None
        is_first_byte = following == "text" and symbol_sets.text_may_follow(kind)
        if following_symbols is None or is_first_byte or (following is None and not is_call):
            return
        symbol = symbol_sets.symbol_of(following_symbols.symbol_set, following) if following else -1
        student_byte = offsets[0] + following_symbols.student_lead
        teacher_byte = offsets[1] + following_symbols.teacher_lead
        add(student_byte, teacher_byte, following_symbols.symbol_set, symbol)

    before: TurnPart | None = None
    offsets = (0, 0)
    for index, part in enumerate(parts):
        starts = student.starts[index], teacher.starts[index]
        end_part(before, part.kind, offsets)
        kind_before: PartKind = before.kind if before is not None else "start"
        for offset, byte in enumerate(part.text):
            symbol_set = symbol_sets.within(part.kind, part.text[:offset])
            if offset == 0:
                symbol_set = symbol_sets.at_first_byte(part.kind, kind_before)
            add(starts[0] + offset, starts[1] + offset, symbol_set, byte)
        before, offsets = part, (starts[0] + len(part.text), starts[1] + len(part.text))
    end_part(before, "end" if is_ended else None, offsets)
    return points

"""The positions of a turn at which two models are compared byte by byte, and their symbols.

A unit is a position at which both models predict what comes next: the next byte, or a marker of
the template (a call's opening, the end of the turn). It may be at the start of a token or inside
one; inside a token a model's probabilities are those of the tokens that begin with the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stillroom.models.reread.token_bytes import TokenBytes, encode
from stillroom.models.reread.turns import (
    Kind,
    TurnMarks,
    TurnPart,
    common_prefix,
    json_object_end,
    texts_between,
)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A marker as one symbol: the tokens and the bytes that begin it on each side.

    A byte that begins a marker on one side only, and is not text, is ignored on the other;
    whitespace that may also be text counts as the symbol on both.
    """

    student_ids: tuple[int, ...] = ()
    teacher_ids: tuple[int, ...] = ()
    student_bytes: tuple[int, ...] = ()
    teacher_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The symbols that are distinguished at a position; all others count as one."""

    symbols: tuple[Symbol, ...]
    has_bytes: bool = True
    """Whether each next byte is a symbol of its own."""
    is_conditional: bool = False
    """Whether only bytes count, because an earlier marker of one side has started text."""
    of_kind: Mapping[Kind, int] = field(default_factory=dict[Kind, int])
    """256 plus the index of the symbol that begins the next part, by that part's kind."""


class Unit(NamedTuple):
    """A position at which both models are compared."""

    student_token: int
    student_prefix: bytes
    """The bytes of the student's token before the position."""
    teacher_token: int
    teacher_prefix: bytes
    teacher_before: bytes
    """The teacher's previous token, if the position is at its end and it might be longer."""
    choice: int
    """The index in `Choices.known`."""
    symbol: int
    """The sampled byte, or 256 plus the index of the choice's symbol; -1: neither."""


class ReadingSide(NamedTuple):
    """One model's tokenizer with the markers of its template."""

    tokenizer: Any
    tokens: TokenBytes
    marks: TurnMarks
    stop_ids: frozenset[int]


@dataclass(slots=True)
class Choices:
    """The choices of a pair of models, created as they are needed."""

    student: ReadingSide
    teacher: ReadingSide
    known: list[Choice] = field(default_factory=list[Choice])
    _index: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def within(self, kind: Kind, text: bytes = b"") -> int:
        """Returns the choice at a byte inside a part, or right after its last byte.

        text: the part so far; if it ends in whitespace, a marker may have begun with that.
        """
        return self._get("blank" if text[-1:].isspace() else "within", kind)

    def after(self, kind: Kind) -> "Chosen | None":
        """Returns the choice of what follows a part, after the text that is written in any case.

        None if nothing follows the part on both sides.
        """
        texts = self._texts(kind)
        if not texts[0]:
            return None
        student, teacher = (
            lead(side, one) for side, one in zip((self.student, self.teacher), texts, strict=True)
        )
        return Chosen(len(student.encode()), len(teacher.encode()), self._get("after", kind))

    def closing(self, kind: Kind) -> str:
        """Returns the text that the teacher's template always writes after a part."""
        return lead(self.teacher, self._texts(kind)[1])

    def at_first_byte(self, kind: Kind, before: Kind) -> int:
        """Returns the choice at the first byte of a part."""
        if kind != "text" or before not in ("start", "thought"):
            return self.within(kind)
        if self.begins_freely(before):
            return self._get("after", before)
        return self._get("bytes", "text")

    def begins_freely(self, kind: Kind) -> bool:
        """Whether content may follow such a part on both sides without a marker of its own."""
        texts = self._texts(kind)
        sides = zip((self.student, self.teacher), texts, strict=True)
        return all("text" in one and one["text"] == lead(side, one) for side, one in sides)

    def _texts(self, kind: Kind) -> tuple[dict[Kind, str], dict[Kind, str]]:
        """Returns each template's text before each kind of part that may follow on both sides."""
        ours, other = (texts_between(side.marks, kind) for side in (self.student, self.teacher))
        both = ours.keys() & other.keys()
        return {k: t for k, t in ours.items() if k in both}, {
            k: t for k, t in other.items() if k in both
        }

    def _get(self, place: str, kind: Kind) -> int:
        key = (place, kind)
        if key not in self._index:
            self._index[key] = len(self.known)
            self.known.append(self._build(place, kind))
        return self._index[key]

    def _build(self, place: str, kind: Kind) -> Choice:
        if place == "bytes":
            return Choice((), is_conditional=True)
        if place != "after" and kind == "arguments":
            # Arguments end at their last brace, so no marker can follow one of their bytes.
            return Choice(())
        ours, other = self._texts(kind)
        if place == "after":
            ours, other = _without_lead(self.student, ours), _without_lead(self.teacher, other)
        has_bytes = place != "after" or self.begins_freely(kind)
        is_text = has_bytes and kind in ("start", "text", "thought")
        starts: dict[Kind, Symbol] = {}
        for following in sorted(ours):
            if ours[following] and other[following]:
                is_end = following == "end"
                starts[following] = _build_symbol(
                    _begin(self.student, ours[following], is_end=is_end),
                    _begin(self.teacher, other[following], is_end=is_end),
                    is_text=is_text,
                    is_after_blank=place == "blank",
                )
        symbols = _merge(list(starts.values()))
        of_kind: dict[Kind, int] = {
            following: 256 + index
            for following, start in starts.items()
            for index, symbol in enumerate(symbols)
            if _overlap(start, symbol)
        }
        return Choice(symbols, has_bytes=has_bytes, of_kind=of_kind)

    def symbol_of(self, choice: int, following: Kind) -> int:
        """Returns the number of the symbol that begins the next part; -1 if there is none."""
        return self.known[choice].of_kind.get(following, -1)


class Chosen(NamedTuple):
    """A choice, and the number of bytes that each template always writes before it."""

    student_lead: int
    teacher_lead: int
    choice: int


def lead(side: ReadingSide, texts: Mapping[Kind, str]) -> str:
    """Returns the text that a template writes in any case; up to its first marker if fixed."""
    if len(texts) != 1:
        return common_prefix(*texts.values())
    [text] = texts.values()
    before = b""
    for token in encode(side.tokenizer, text):
        if token in side.tokens.marks:
            return before.decode()
        before += side.tokens.of_token[token]
    return text


def _without_lead(side: ReadingSide, texts: Mapping[Kind, str]) -> dict[Kind, str]:
    return {kind: text[len(lead(side, texts)) :] for kind, text in texts.items()}


class _Begin(NamedTuple):
    """How one side begins a marker: whitespace and a token, a token, or a byte of text."""

    ids: tuple[int, ...]
    blank: int | None = None
    byte: int | None = None


def _begin(side: ReadingSide, text: str, *, is_end: bool) -> _Begin:
    first = encode(side.tokenizer, text.lstrip() or text)[0]
    if first not in side.tokens.marks:
        return _Begin((), byte=text.encode()[0])
    ends = side.stop_ids & side.tokens.marks if is_end else frozenset[int]()
    blank = text.encode()[0] if text[0].isspace() else None
    return _Begin(tuple(sorted({first, *ends})), blank)


def _build_symbol(one: _Begin, two: _Begin, *, is_text: bool, is_after_blank: bool) -> Symbol:
    """Returns the symbol of a marker that begins as `one` (student) and `two` (teacher).

    is_text: whether text may continue here, so that whitespace may be text or begin the marker.
    """
    if one.byte is not None or two.byte is not None or not is_text:
        bytes_ = [
            tuple(byte for byte in (begin.blank, begin.byte) if byte is not None)
            for begin in (one, two)
        ]
        return Symbol(one.ids, two.ids, *bytes_)
    blanks = tuple(sorted({blank for blank in (one.blank, two.blank) if blank is not None}))
    if is_after_blank or one.blank == two.blank:
        # The whitespace has been written, or is the same byte on both sides.
        blanks = ()
    return Symbol(one.ids, two.ids, blanks, blanks)


def _merge(symbols: Sequence[Symbol]) -> tuple[Symbol, ...]:
    """Returns the symbols, merged where they begin with the same token or byte on a side."""
    merged: list[Symbol] = []
    for symbol in symbols:
        one = symbol
        for other in list(merged):
            if _overlap(one, other):
                merged.remove(other)
                one = Symbol(
                    *(
                        tuple(sorted({*a, *b}))
                        for a, b in zip(_columns(one), _columns(other), strict=True)
                    )
                )
        merged.append(one)
    return tuple(merged)


def _overlap(one: Symbol, other: Symbol) -> bool:
    pairs = zip(_columns(one), _columns(other), strict=True)
    return any(set(a) & set(b) for a, b in pairs)


def _columns(symbol: Symbol) -> tuple[tuple[int, ...], ...]:
    return symbol.student_ids, symbol.teacher_ids, symbol.student_bytes, symbol.teacher_bytes


def is_whole_call(part: TurnPart) -> bool:
    """Whether a part is the complete arguments of a call, a JSON object."""
    if part.kind != "arguments":
        return False
    text = part.text.decode()
    return json_object_end(text) == len(text)


class Places:
    """The tokens of one side's turn, by byte offset."""

    def __init__(self, side: ReadingSide, ids: Sequence[int]) -> None:
        self._words = [side.tokens.of_token[token] for token in ids]
        self._is_mark = [token in side.tokens.marks for token in ids]
        self._place: list[tuple[int, int]] = [
            (index, offset) for index, word in enumerate(self._words) for offset in range(len(word))
        ]

    def at(self, byte: int) -> tuple[int, bytes] | None:
        """Returns the index of a byte's token and the token's earlier bytes; None if unknown."""
        if not 0 <= byte < len(self._place):
            return None
        index, offset = self._place[byte]
        if offset and self._is_mark[index]:
            return None
        return index, self._words[index][:offset]

    def previous_text(self, index: int, prefix: bytes) -> bytes:
        """Returns the previous token's text if a token begins here and that one is no marker."""
        is_text = not prefix and index > 0 and not self._is_mark[index - 1]
        return self._words[index - 1] if is_text else b""


class WrittenParts(NamedTuple):
    """The tokens of a turn on one side, and the byte at which each part starts."""

    places: Places
    starts: Sequence[int]


def turn_units(
    choices: Choices,
    parts: Sequence[TurnPart],
    student: WrittenParts,
    teacher: WrittenParts,
    *,
    is_ended: bool,
) -> list[Unit]:
    """Returns the units of a turn, in order; `parts` are the same on both sides."""
    units: list[Unit] = []

    def add(student_byte: int, teacher_byte: int, choice: int, symbol: int) -> None:
        here, there = student.places.at(student_byte), teacher.places.at(teacher_byte)
        if here is not None and there is not None:
            before = teacher.places.previous_text(*there)
            units.append(Unit(*here, *there, before, choice, symbol))

    def end_part(before: TurnPart | None, following: Kind | None, at: tuple[int, int]) -> None:
        """Adds the positions that decide whether a part ends and what follows it."""
        kind: Kind = before.kind if before is not None else "start"
        is_call = before is not None and is_whole_call(before)
        if before is not None and not is_call:
            choice = choices.within(kind, before.text)
            add(*at, choice, choices.symbol_of(choice, following) if following else -1)
        chosen = choices.after(kind) if kind not in ("text", "name") else None
        is_first_byte = following == "text" and choices.begins_freely(kind)
        if chosen is None or is_first_byte or (following is None and not is_call):
            return
        symbol = choices.symbol_of(chosen.choice, following) if following else -1
        add(at[0] + chosen.student_lead, at[1] + chosen.teacher_lead, chosen.choice, symbol)

    before: TurnPart | None = None
    at = (0, 0)
    for index, part in enumerate(parts):
        starts = student.starts[index], teacher.starts[index]
        end_part(before, part.kind, at)
        kind_before: Kind = before.kind if before is not None else "start"
        for offset, byte in enumerate(part.text):
            choice = choices.within(part.kind, part.text[:offset])
            if offset == 0:
                choice = choices.at_first_byte(part.kind, kind_before)
            add(starts[0] + offset, starts[1] + offset, choice, byte)
        before, at = part, (starts[0] + len(part.text), starts[1] + len(part.text))
    end_part(before, "end" if is_ended else None, at)
    return units

"""Splits an assistant's turn, as a chat template writes it, into its parts and markers.

Both models' texts of a turn have the same parts in the same order: thinking, content, and for each
call its name and its arguments. The texts around them are markers of the template, found by probing
it. Which marker follows a part is all the information that markers carry.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import ModelError
from stillroom.types import Message, ToolSchema

_THOUGHT, _TEXT = "xqthoughtqx", "xqtextqx"
_NAMES = ("xqnamezqx", "xqnamevqx")
_ARGUMENTS = ('{"xqkeyzqx": "xqvalzqx"}', '{"xqkeyvqx": "xqvalvqx"}')


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """The texts that a chat template writes before, between and after the parts of a turn.

    None: the template cannot render a turn with this text.
    """

    before_text: str
    """The text at the start of a turn, before its content."""
    end_text: str
    """The text at the end of a turn, after its content."""
    before_call: str | None = None
    """The text at the start of a turn, before the name of its first call."""
    text_to_call: str | None = None
    separator: str | None = None
    """The text between a call's name and its arguments."""
    call_to_call: str | None = None
    """The text between a call's arguments and the next call's name."""
    end_call: str | None = None
    before_thought: str | None = None
    thought_to_text: str | None = None
    thought_to_call: str | None = None

    @property
    def supports_calls(self) -> bool:
        """Whether the template renders a call with its arguments verbatim."""
        return None not in (self.before_call, self.separator, self.end_call)

    @property
    def supports_thinking(self) -> bool:
        """Whether the template renders thinking."""
        return self.before_thought is not None


def turn_markers(renderer: ChatRenderer, tools: Sequence[ToolSchema], name: str) -> TurnMarkers:
    """Returns the markers of a template; name: the model's name in errors.

    Raises ModelError if the template does not render a plain answer verbatim.
    """

    def texts_around(parts: list[str], message: Message) -> list[str] | None:
        try:
            return _texts_around(renderer.turn_text(message, tools), parts)
        except ModelError:
            return None

    plain = texts_around([_TEXT], _probe_turn(text=_TEXT))
    if plain is None:
        raise ModelError(
            f"the chat template of {name} does not render a plain answer verbatim",
            "fix chat_template.jinja, or use another model",
        )
    markers: dict[str, str] = {}
    if (
        thinking := texts_around([_THOUGHT, _TEXT], _probe_turn(thought=_THOUGHT, text=_TEXT))
    ) is not None:
        markers |= {"before_thought": thinking[0], "thought_to_text": thinking[1]}
    if tools:
        call = [_NAMES[0], _ARGUMENTS[0]]
        if (alone := texts_around(call, _probe_turn(calls=1))) is not None:
            markers |= dict(zip(("before_call", "separator", "end_call"), alone, strict=True))
        if (both := texts_around([_TEXT, *call], _probe_turn(text=_TEXT, calls=1))) is not None:
            markers["text_to_call"] = both[1]
        parts = [*call, _NAMES[1], _ARGUMENTS[1]]
        if (two := texts_around(parts, _probe_turn(calls=2))) is not None:
            markers["call_to_call"] = two[2]
        if (
            thinking := texts_around([_THOUGHT, *call], _probe_turn(thought=_THOUGHT, calls=1))
        ) is not None:
            markers["thought_to_call"] = thinking[1]
    return TurnMarkers(before_text=plain[0], end_text=plain[1], **markers)


def _probe_turn(*, thought: str = "", text: str = "", calls: int = 0) -> Message:
    """Returns an assistant message with probe texts as its parts, and `calls` tool calls."""
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                # Mistral's templates require ids of nine characters.
                "id": f"abcdefgh{index}",
                "type": "function",
                "function": {"name": _NAMES[index], "arguments": _ARGUMENTS[index]},
            }
            for index in range(calls)
        ]
    return message


def _texts_around(turn: str, parts: Sequence[str]) -> list[str] | None:
    """Returns the texts before, between and after the parts; None unless each occurs once."""
    texts: list[str] = []
    end = 0
    for part in parts:
        start = turn.find(part, end)
        if start < 0 or turn.count(part) != 1:
            return None
        texts.append(turn[end:start])
        end = start + len(part)
    return [*texts, turn[end:]]


def common_prefix(*texts: str | None) -> str:
    """Returns the longest common prefix of the given texts; None arguments are ignored."""
    present = [text for text in texts if text is not None]
    letters = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*present, strict=False))
    return "".join(column[0] for column in letters)


def json_object_end(text: str) -> int | None:
    """Returns the end of the JSON object at the start of a text; None if it is incomplete."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    is_object: Any = isinstance(value, dict)
    return end if is_object else None


PartKind = Literal["start", "thought", "text", "name", "arguments", "end"]
"""The kind of a part; `start` and `end` are the turn's start and end, which have no text."""


class TurnPart(NamedTuple):
    """A part of a turn, as text."""

    kind: PartKind
    text: bytes


@dataclass(frozen=True, slots=True)
class TurnParts:
    """The parts of one turn, and where each begins in the student's text."""

    parts: list[TurnPart]
    starts: list[int]
    """The byte offset of each part in the student's text."""
    is_ended: bool
    """Whether the turn is well formed and complete."""
    unparsed: bytes = b""
    """The text after the last part that could not be parsed; empty for a well-formed turn."""


def parse_turn(text: bytes, markers: TurnMarkers, *, has_calls: bool, end: bytes) -> TurnParts:
    """Splits a turn into its parts, using the markers of the template that it was sampled with.

    has_calls: whether the turn was parsed as tool calls; otherwise all of it is content.
    end: the bytes of the stop token at the end of `text`; empty if generation was cut off by a
    limit.
    """
    return _TurnParser(text, markers, end).parse(has_calls=has_calls)


class _TurnParser:
    """Parses one turn from its first byte."""

    def __init__(self, text: bytes, markers: TurnMarkers, end: bytes) -> None:
        self._text, self._markers, self._end = text[: len(text) - len(end)], markers, end
        self._offset = 0
        self._parts: list[TurnPart] = []
        self._starts: list[int] = []

    def parse(self, *, has_calls: bool) -> TurnParts:
        """Returns the parts of the turn; see `parse_turn`."""
        if not self._parse_thought():
            return self._malformed()
        call = self._first_call_offset() if has_calls else None
        closing = self._closing(self._markers.end_text) if call is None else b""
        stop = len(self._text) - len(closing) if call is None else call
        if stop > self._offset and not self._add_part("text", stop):
            return self._malformed()
        if call is not None:
            while True:
                if not self._parse_call():
                    return self._malformed()
                between = self._markers.call_to_call
                if not between or not self._text.startswith(between.encode(), self._offset):
                    break
            closing = self._closing(self._markers.end_call or "")
        if self._text[self._offset :] != closing:
            return self._malformed()
        return TurnParts(self._parts, self._starts, bool(self._end))

    def _closing(self, ending: str) -> bytes:
        """Returns the template's text before the stop token; empty if the turn lacks it."""
        closing = ending.encode()
        closing = closing[: len(closing) - len(self._end)] if self._end else b""
        return closing if self._text.endswith(closing) else b""

    def _malformed(self) -> TurnParts:
        """Returns the parts so far and the text that could not be parsed."""
        return TurnParts(self._parts, self._starts, False, self._text[self._offset :])

    def _add_part(self, kind: PartKind, stop: int) -> bool:
        """Adds the text up to `stop` as a part; returns False if it is not all valid UTF-8."""
        text = self._text[self._offset : stop]
        try:
            text.decode()
        except UnicodeDecodeError as error:
            text = text[: error.start]
        if text:
            self._parts.append(TurnPart(kind, text))
            self._starts.append(self._offset)
        self._offset += len(text)
        return self._offset == stop

    def _skip(self, marker: str | None) -> bool:
        """Advances past a marker; returns False if the text does not continue with it."""
        written = (marker or "").encode()
        if marker is None or not self._text.startswith(written, self._offset):
            return False
        self._offset += len(written)
        return True

    def _parse_thought(self) -> bool:
        """Parses thinking, or its empty placeholder, before the content; False if malformed."""
        markers = self._markers
        if self._skip(markers.before_text or None):
            return True
        before, after = markers.before_thought, markers.thought_to_text
        if before is None or after is None:
            return True
        # The turn's header may already have opened the thinking.
        is_open = not before.strip()
        if not is_open and not self._skip(before):
            return True
        shared = common_prefix(after, markers.thought_to_call)
        core = shared.strip()
        stop = self._text.find(core.encode(), self._offset)
        if stop < 0:
            # Unless a marker opened it, thinking without an end is content.
            return True if is_open else self._add_part("thought", len(self._text)) and False
        blank, _, after_core = shared.partition(core)
        inner = stop - len(blank) if self._text[:stop].endswith(blank.encode()) else stop
        if inner > self._offset and not self._add_part("thought", inner):
            return False
        self._offset = stop + len(core.encode())
        self._skip(after_core)
        self._skip(after[len(shared) :])
        return True

    def _first_call_offset(self) -> int | None:
        """Returns the offset of the first call's opening marker; None if there is none."""
        markers = self._markers
        opening = markers.before_call or ""
        core = _first_line(opening[len(common_prefix(opening, markers.before_text)) :])
        start = self._text.find(core, self._offset) if core else -1
        if start < 0:
            return None
        # Whitespace before the first word is the template's only if the template writes it.
        for text in (markers.text_to_call or "", opening):
            blank = text[: len(text) - len(text.lstrip())].encode()
            if blank and self._text[self._offset : start].endswith(blank):
                return start - len(blank)
        return start

    def _parse_call(self) -> bool:
        """Parses a call's opening, name and arguments; returns False if malformed."""
        markers = self._markers
        openings = [markers.before_call, markers.text_to_call, markers.call_to_call]
        # Longest first, as one may be a prefix of another.
        variants = sorted({text for text in openings if text}, key=len, reverse=True)
        shared = common_prefix(markers.before_call, markers.before_text)
        variants += [text[len(shared) :] for text in variants if shared and text.startswith(shared)]
        variants += [text.lstrip() for text in variants]
        if not any(self._skip(text) for text in variants):
            return False
        separator = (markers.separator or "").encode()
        stop = self._text.find(separator, self._offset)
        if stop < 0:
            return self._add_part("name", len(self._text)) and False
        if not self._add_part("name", stop):
            return False
        self._offset = stop + len(separator)
        remaining = self._text[self._offset :].decode(errors="replace")
        length = json_object_end(remaining)
        if length is None:
            return self._add_part("arguments", len(self._text)) and False
        return self._add_part("arguments", self._offset + len(remaining[:length].encode()))


def _first_line(opening: str) -> bytes:
    """Returns the first line of an opening marker, by which it is recognised."""
    stripped = opening.strip()
    return stripped.split("\n")[0].encode()


def texts_between(markers: TurnMarkers, before: PartKind) -> dict[PartKind, str]:
    """Returns the template's text between a part and each kind of part that may follow it."""
    texts: dict[PartKind, dict[PartKind, str | None]] = {
        "start": {
            "text": markers.before_text,
            "name": markers.before_call,
            "thought": markers.before_thought,
            "end": markers.before_text + markers.end_text,
        },
        "thought": {
            "text": markers.thought_to_text,
            "name": markers.thought_to_call,
            "end": None
            if markers.thought_to_text is None
            else markers.thought_to_text + markers.end_text,
        },
        "text": {"name": markers.text_to_call, "end": markers.end_text},
        "name": {"arguments": markers.separator},
        "arguments": {"name": markers.call_to_call, "end": markers.end_call},
        "end": {},
    }
    return {kind: text for kind, text in texts[before].items() if text is not None}

"""An assistant's turn as a chat template writes it: its parts, and the marks around them.

Both models' texts of a turn have the same parts in the same order: thinking, content, and for each
call its name and its arguments. What is around them are marks of the template, of which only the
choice between them means something; they are found by probing the template."""

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
class TurnMarks:
    """The texts that a chat template writes before, between and after the parts of a turn.

    A text is None where the template cannot show such a turn.
    """

    before_text: str
    """What a turn begins with before its content."""
    end_text: str
    """What ends a turn after its content."""
    before_call: str | None = None
    """What a turn begins with before the name of its first call."""
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
    def has_calls(self) -> bool:
        """Whether the template can show a call with its arguments as they were written."""
        return None not in (self.before_call, self.separator, self.end_call)

    @property
    def has_thought(self) -> bool:
        """Whether the template shows the thinking of a turn."""
        return self.before_thought is not None


def turn_marks(renderer: ChatRenderer, tools: Sequence[ToolSchema], name: str) -> TurnMarks:
    """Returns the marks of a template; `name` is what an error calls the model.

    Raises ModelError if the template does not show the text of a plain answer.
    """

    def marks(parts: list[str], message: Message) -> list[str] | None:
        try:
            return _around(renderer.turn_text(message, tools), parts)
        except ModelError:
            return None

    plain = marks([_TEXT], _turn(text=_TEXT))
    if plain is None:
        raise ModelError(
            f"the chat template of {name} does not show a plain answer as it was written",
            "fix chat_template.jinja, or use another model",
        )
    found: dict[str, str] = {}
    if (thinking := marks([_THOUGHT, _TEXT], _turn(thought=_THOUGHT, text=_TEXT))) is not None:
        found |= {"before_thought": thinking[0], "thought_to_text": thinking[1]}
    if tools:
        call = [_NAMES[0], _ARGUMENTS[0]]
        if (alone := marks(call, _turn(calls=1))) is not None:
            found |= dict(zip(("before_call", "separator", "end_call"), alone, strict=True))
        if (both := marks([_TEXT, *call], _turn(text=_TEXT, calls=1))) is not None:
            found["text_to_call"] = both[1]
        parts = [*call, _NAMES[1], _ARGUMENTS[1]]
        if (two := marks(parts, _turn(calls=2))) is not None:
            found["call_to_call"] = two[2]
        if (thinking := marks([_THOUGHT, *call], _turn(thought=_THOUGHT, calls=1))) is not None:
            found["thought_to_call"] = thinking[1]
    return TurnMarks(before_text=plain[0], end_text=plain[1], **found)


def _turn(*, thought: str = "", text: str = "", calls: int = 0) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"abcdefgh{place}",
                "type": "function",
                "function": {"name": _NAMES[place], "arguments": _ARGUMENTS[place]},
            }
            for place in range(calls)
        ]
    return message


def _around(turn: str, parts: Sequence[str]) -> list[str] | None:
    """Returns the texts before, between and after the parts; None unless each occurs once."""
    found: list[str] = []
    at = 0
    for part in parts:
        start = turn.find(part, at)
        if start < 0 or turn.count(part) != 1:
            return None
        found.append(turn[at:start])
        at = start + len(part)
    return [*found, turn[at:]]


def shared_start(*texts: str | None) -> str:
    """Returns what all given texts begin with; texts that are None do not count."""
    given = [text for text in texts if text is not None]
    letters = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*given, strict=False))
    return "".join(column[0] for column in letters)


def whole_json(text: str) -> int | None:
    """Returns where the JSON object that a text begins with ends; None if it has no end."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    is_object: Any = isinstance(value, dict)
    return end if is_object else None


Kind = Literal["start", "thought", "text", "name", "arguments", "end"]
"""The kind of a part; start and end stand for the turn's two ends."""


class TurnPart(NamedTuple):
    """A part of a turn with its text."""

    kind: Kind
    text: bytes


@dataclass(frozen=True, slots=True)
class TurnParts:
    """The parts of one turn, and where each begins in the text that the student wrote."""

    parts: list[TurnPart]
    starts: list[int]
    """The first byte of each part in the student's text."""
    is_ended: bool
    """Whether the turn is well formed and was ended."""
    rest: bytes = b""
    """What follows the last part and could not be read; empty for a well-formed turn."""


def read_turn(text: bytes, marks: TurnMarks, *, has_calls: bool, end: bytes) -> TurnParts:
    """Returns the parts of a turn as its own template writes them.

    has_calls: whether the turn was taken to call tools; else all of it is content.
    end: the bytes of the token that ended the turn, with which `text` ends; empty if it continued
    to a limit.
    """
    return _Reader(text, marks, end).read(has_calls=has_calls)


class _Reader:
    """Reads one turn from its first byte on."""

    def __init__(self, text: bytes, marks: TurnMarks, end: bytes) -> None:
        self._text, self._marks, self._end = text[: len(text) - len(end)], marks, end
        self._at = 0
        self._parts: list[TurnPart] = []
        self._starts: list[int] = []

    def read(self, *, has_calls: bool) -> TurnParts:
        if not self._thought():
            return self._stopped()
        call = self._call_start() if has_calls else None
        closing = self._closing(self._marks.end_text) if call is None else b""
        stop = len(self._text) - len(closing) if call is None else call
        if stop > self._at and not self._take("text", stop):
            return self._stopped()
        if call is not None:
            while True:
                if not self._call():
                    return self._stopped()
                between = self._marks.call_to_call
                if not between or not self._text.startswith(between.encode(), self._at):
                    break
            closing = self._closing(self._marks.end_call or "")
        if self._text[self._at :] != closing:
            return self._stopped()
        return TurnParts(self._parts, self._starts, bool(self._end))

    def _closing(self, ending: str) -> bytes:
        """Returns what the template writes before the token that ends the turn, if it is there."""
        closing = ending.encode()
        closing = closing[: len(closing) - len(self._end)] if self._end else b""
        return closing if self._text.endswith(closing) else b""

    def _stopped(self) -> TurnParts:
        return TurnParts(self._parts, self._starts, False, self._text[self._at :])

    def _take(self, kind: Kind, stop: int) -> bool:
        """Makes the text up to `stop` a part; False if some of it are no whole characters."""
        taken = self._text[self._at : stop]
        try:
            taken.decode()
        except UnicodeDecodeError as error:
            taken = taken[: error.start]
        if taken:
            self._parts.append(TurnPart(kind, taken))
            self._starts.append(self._at)
        self._at += len(taken)
        return self._at == stop

    def _skip(self, mark: str | None) -> bool:
        """Goes past a mark; False if the text has something else here."""
        written = (mark or "").encode()
        if mark is None or not self._text.startswith(written, self._at):
            return False
        self._at += len(written)
        return True

    def _thought(self) -> bool:
        """Reads what comes before the content: thinking, or an empty place for it."""
        marks = self._marks
        if self._skip(marks.before_text or None):
            return True
        before, after = marks.before_thought, marks.thought_to_text
        if before is None or after is None:
            return True
        # The header may have opened the thinking already.
        is_open = not before.strip()
        if not is_open and not self._skip(before):
            return True
        shared = shared_start(after, marks.thought_to_call)
        core = shared.strip()
        stop = self._text.find(core.encode(), self._at)
        if stop < 0:
            # Where the header may or may not open it, thinking without an end is content.
            return True if is_open else self._take("thought", len(self._text)) and False
        blank, _, rest = shared.partition(core)
        inner = stop - len(blank) if self._text[:stop].endswith(blank.encode()) else stop
        if inner > self._at and not self._take("thought", inner):
            return False
        self._at = stop + len(core.encode())
        self._skip(rest)
        self._skip(after[len(shared) :])
        return True

    def _call_start(self) -> int | None:
        """Returns where the first call's opening begins; None if there is none."""
        marks = self._marks
        opening = marks.before_call or ""
        core = _core(opening[len(shared_start(opening, marks.before_text)) :])
        found = self._text.find(core, self._at) if core else -1
        if found < 0:
            return None
        # A blank before the first word belongs to the template only if the template writes it.
        for text in (marks.text_to_call or "", opening):
            blank = text[: len(text) - len(text.lstrip())].encode()
            if blank and self._text[self._at : found].endswith(blank):
                return found - len(blank)
        return found

    def _call(self) -> bool:
        """Reads a call's opening, name and arguments; False where it is not well formed."""
        marks = self._marks
        openings = [marks.before_call, marks.text_to_call, marks.call_to_call]
        # The longest first, as one may be the beginning of another.
        known = sorted({text for text in openings if text}, key=len, reverse=True)
        shared = shared_start(marks.before_call, marks.before_text)
        known += [text[len(shared) :] for text in known if shared and text.startswith(shared)]
        known += [text.lstrip() for text in known]
        if not any(self._skip(text) for text in known):
            return False
        separator = (marks.separator or "").encode()
        stop = self._text.find(separator, self._at)
        if stop < 0:
            return self._take("name", len(self._text)) and False
        if not self._take("name", stop):
            return False
        self._at = stop + len(separator)
        rest = self._text[self._at :].decode(errors="replace")
        length = whole_json(rest)
        if length is None:
            return self._take("arguments", len(self._text)) and False
        return self._take("arguments", self._at + len(rest[:length].encode()))


def _core(opening: str) -> bytes:
    """Returns an opening's first word, by which it is recognised."""
    stripped = opening.strip()
    return stripped.split("\n")[0].encode()


def texts_between(marks: TurnMarks, before: Kind) -> dict[Kind, str]:
    """Returns what the template writes between a part and each kind of part that may follow."""
    choices: dict[Kind, dict[Kind, str | None]] = {
        "start": {
            "text": marks.before_text,
            "name": marks.before_call,
            "thought": marks.before_thought,
            "end": marks.before_text + marks.end_text,
        },
        "thought": {
            "text": marks.thought_to_text,
            "name": marks.thought_to_call,
            "end": None
            if marks.thought_to_text is None
            else marks.thought_to_text + marks.end_text,
        },
        "text": {"name": marks.text_to_call, "end": marks.end_text},
        "name": {"arguments": marks.separator},
        "arguments": {"name": marks.call_to_call, "end": marks.end_call},
        "end": {},
    }
    return {kind: text for kind, text in choices[before].items() if text is not None}

"""What a chat template writes around the parts of an assistant's turn, found by probing it."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """What stands between a call's name and its arguments."""
    call_to_call: str | None = None
    """What stands between a call's arguments and the next call's name."""
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
            "mend chat_template.jinja, or take another model",
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

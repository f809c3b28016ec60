"""Finds the assistant's turns in a rendered conversation, and checks that each is unchanged.

Templates render the last turn as the model writes it. But many change earlier turns: they drop the
thinking, end the turn with another token, or move the tools. A turn counts as found only where the
text has it exactly as the model writes it.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from stillroom.data.chat.template import (
    PROBE,
    ChatTemplate,
    plain_text,
    thinking_of,
    without_thinking,
)
from stillroom.errors import ModelError
from stillroom.types import Message, ToolCall, ToolSchema

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """The last turn of a conversation as the model writes it: the text before it, and its own."""

    before: str
    turn: str

    def whole_in(self, text: str) -> str:
        """Returns `text` if it begins with `before` and `turn`, else these two joined."""
        return text if text.startswith(self.before + self.turn) else self.before + self.turn


class TurnFinder:
    """Finds the assistant's turns in the texts that a template makes of conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def find(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], wanted: Collection[int]
    ) -> tuple[str, dict[int, Span]]:
        """Returns the rendered text, and the spans of the `wanted` turns by their message's index.

        A span ends with the turn's end-of-turn token. A turn that is not in the text exactly as the
        model writes it has no span. Raises ModelError if a turn cannot be separated from the rest.
        """
        text, likely = self._likely(messages, tools)
        if not likely and len(messages) - 1 in wanted:
            # The template may render earlier turns differently once this turn follows them. The
            # text to use is then the one that the model reads before it writes this turn.
            text = self.written(messages, tools).whole_in(text)
        spans: dict[int, Span] = {}
        turns = (index for index, message in enumerate(messages) if message["role"] == "assistant")
        for number, index in enumerate(turns):
            if index not in wanted:
                continue
            span = likely[number] if likely else None
            if span is None or not self._is_plain(text[slice(*span)], messages, index):
                span = self._exact(text, span, messages[: index + 1], tools)
            if span is not None:
                spans[index] = span
        return text, spans

    def _likely(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, list[Span]]:
        """Returns the text and the likely spans of all turns; no spans if they are uncertain."""
        num_turns = sum(message["role"] == "assistant" for message in messages)
        if self._template.is_tagged:
            text, tagged = self._template.tagged(messages, tools)
            spans = [self._whole_turn(text, start, end) for start, end in tagged]
        else:
            text = self._template.text(messages, tools)
            spans = self._by_header(self._veiled(text, messages, tools), len(text))
        return text, spans if len(spans) == num_turns and self._is_steady else []

    def _is_plain(self, turn: str, messages: Sequence[Message], index: int) -> bool:
        """Returns whether the text is obviously the whole turn and nothing else.

        If not, it may still be the turn, since a template may trim, escape or drop parts of it.
        """
        message, header = messages[index], self._template.header
        parts = [plain_text(message).strip(), *_called_names(message)]
        if self._template.include_thinking:
            parts.append(thinking_of(message).strip())
        after = plain_text(messages[index + 1]).strip() if index + 1 < len(messages) else ""
        is_alone = not (after and after in turn) and not (header and header in turn)
        return is_alone and all(part in turn for part in parts)

    def _exact(
        self, text: str, span: Span | None, upto: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Span | None:
        """Returns the span of `upto`'s last turn; None if it is not in the text as written.

        `span` is the likely span of the turn; None if it is unknown.
        """
        written = self.written(upto, tools)
        lead = self._template.lead if self._template.lead.strip() else ""
        # The empty thinking block that only a last turn begins with may be missing.
        if span is not None and written.turn in (turn := text[slice(*span)], lead + turn):
            return span
        start = len(written.before)
        is_here = text.startswith(written.before) and text.startswith(written.turn, start)
        return (start, start + len(written.turn)) if is_here else None

    def written(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> WrittenTurn:
        """Returns the last turn as the model writes it, when no message has followed it yet."""
        if self._template.is_tagged:
            text, tagged = self._template.tagged(messages, tools)
            if not tagged:
                raise _no_telling(len(messages) - 1)
            start, end = self._whole_turn(text, *tagged[-1])
        else:
            before = self._template.text(messages[:-1], tools, add_generation_prompt=True)
            text = self._template.text(messages, tools)
            if not text.startswith(before):
                text = before + self._without_history(messages, tools)
            start, end = self._whole_turn(text, len(before), len(text))
        written = WrittenTurn(text[:start], text[start:end])
        thinking = thinking_of(messages[-1]).strip() if self._template.include_thinking else ""
        if thinking not in written.turn:
            raise ModelError(
                f"this model's chat template leaves out the thinking of "
                f"messages[{len(messages) - 1}]",
                "set rollout.include_thinking to false, or choose a student that thinks",
            )
        return written

    def _without_history(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Returns the text that the last message adds if no earlier message has thinking."""
        bare = [*map(without_thinking, messages[:-1]), messages[-1]]
        before = self._template.text(bare[:-1], tools, add_generation_prompt=True)
        text = self._template.text(bare, tools)
        if not text.startswith(before):
            raise _no_telling(len(messages) - 1)
        return text[len(before) :]

    @cached_property
    def _is_steady(self) -> bool:
        """Whether the text before a turn stays the same when the conversation continues."""
        for num_before, messages, tools in _probes():
            try:
                earlier = self._template.text(
                    messages[:num_before], tools, add_generation_prompt=True
                )
                later = self._template.text(messages, tools)
            except ModelError:  # the template may refuse tools, for example
                continue
            if not later.startswith(earlier):
                return False
        return True

    def _veiled(self, text: str, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Returns the text, with headers and ends of turns inside messages overwritten with x.

        A message may quote such a text, which must not be taken for a turn. The length of the text
        stays the same, so that spans in the result are spans in `text`.
        """
        quoted = [_veil(message, self._marks) for message in messages]
        schemas = [_veil(tool, self._marks) for tool in tools]
        if quoted == list(messages) and schemas == list(tools):
            return text
        return self._template.text(quoted, schemas)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """The pattern of texts that could be taken for a header or for the end of a turn."""
        header = self._template.header
        marks = {token for token in self._template.control if token in header}
        marks |= {header.strip(), self._template.end_of_turn} - {""}
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))

    def _by_header(self, text: str, length: int) -> list[Span]:
        """Returns the spans from each header to the next end-of-turn token; none if lengths differ.

        `length` is that of the text before quoted marks were overwritten.
        """
        header, end_of_turn = self._template.header, self._template.end_of_turn
        spans: list[Span] = []
        if not header or len(text) != length:
            return spans
        at = text.find(header)
        while at >= 0:
            start = at + len(header)
            end = text.find(end_of_turn, start)
            if end < 0:
                break
            spans.append((start, end + len(end_of_turn)))
            at = text.find(header, end)
        return spans

    def _whole_turn(self, text: str, start: int, end: int) -> Span:
        """Returns a span that ends exactly with the turn's end-of-turn token."""
        end_of_turn = self._template.end_of_turn
        inside = text.rfind(end_of_turn, start, end)
        if inside >= 0 and self._is_blank(text[inside + len(end_of_turn) : end]):
            return start, inside + len(end_of_turn)
        after = text.find(end_of_turn, end)
        if after >= 0 and not text[end:after].strip():
            return start, after + len(end_of_turn)
        # A call may end with a token of its own.
        turn = text[start:end].rstrip()
        is_ended = any(turn.endswith(token) for token in self._template.control)
        return (start, start + len(turn)) if is_ended else (start, end)

    def _is_blank(self, text: str) -> bool:
        """Returns whether a text holds only blanks and control tokens."""
        for token in self._template.control:
            text = text.replace(token, "")
        return not text.strip()


def _probes() -> Iterator[tuple[int, list[Message], list[ToolSchema]]]:
    """Yields `(number, messages, tools)`: a model would answer after that number of messages."""
    schema: ToolSchema = {
        "type": "function",
        "function": {"name": "z", "description": "z", "parameters": {"type": "object"}},
    }
    call: ToolCall = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "z", "arguments": "{}"},
    }
    calling: Message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "t",
        "tool_calls": [call],
    }
    reply: Message = {"role": "tool", "content": "r", "tool_call_id": call["id"], "name": "z"}
    answer: Message = {"role": "assistant", "content": "y"}
    for tools in ([], [schema]):
        yield 1, [*PROBE, answer, *PROBE], tools
    yield 3, [*PROBE, calling, reply, answer], [schema]


def _no_telling(index: int) -> ModelError:
    return ModelError(
        f"the assistant's turn in messages[{index}] cannot be distinguished from the rest "
        "in this model's chat template",
        "mark it in chat_template.jinja with {% generation %} … {% endgeneration %}",
    )


def _called_names(message: Message) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or []]


def _veil(value: Any, marks: re.Pattern[str]) -> Any:
    """Returns the value with every mark in its texts overwritten by as many letters x."""
    if isinstance(value, str):
        return marks.sub(lambda match: "x" * len(match[0]), value)
    if isinstance(value, dict):
        return {key: _veil(item, marks) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_veil(item, marks) for item in cast("list[Any]", value)]
    return value

"""Finds the assistant's turns in a rendered conversation, and checks that they are unchanged.

Templates render the last turn as the model writes it. But many change earlier turns: they drop the
thinking, end the turn with another token, or move the tools. A turn is found only if the text has
it exactly as the model writes it.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast
from uuid import uuid4

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
class LastTurn:
    """The last turn of a conversation as the model writes it, and the text before it."""

    before: str
    turn: str


class TurnFinder:
    """Finds the assistant's turns in conversations that a template has rendered."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def find(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], indices: Collection[int]
    ) -> tuple[str, dict[int, Span]]:
        """Returns the rendered text, and the spans of the turns at `indices` by message index.

        A span ends with the turn's end-of-turn token. A turn that is not in the text exactly as the
        model writes it has no span. Raises ModelError if a turn cannot be separated from the rest.
        """
        text, likely_spans = self._find_likely(messages, tools)
        if not likely_spans and len(messages) - 1 in indices:
            # The template may render earlier turns differently once this turn follows them. Then
            # the text must be what the model reads before it writes this turn.
            last_turn = self.last_turn(messages, tools)
            if not text.startswith(last_turn.before + last_turn.turn):
                text = last_turn.before + last_turn.turn
        spans: dict[int, Span] = {}
        turns = (index for index, message in enumerate(messages) if message["role"] == "assistant")
        for number, index in enumerate(turns):
            if index not in indices:
                continue
            span = likely_spans[number] if likely_spans else None
            if span is None or not self._is_obvious_turn(text[slice(*span)], messages, index):
                span = self._find_exact(text, span, messages[: index + 1], tools)
            if span is not None:
                spans[index] = span
        return text, spans

    def _find_likely(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, list[Span]]:
        """Returns the text, and the likely spans of all turns if each turn has one."""
        num_turns = sum(message["role"] == "assistant" for message in messages)
        if self._template.has_generation_tags:
            text, tagged = self._template.text_with_spans(messages, tools)
            spans = [self._extend_to_end(text, start, end) for start, end in tagged]
        else:
            text = self._template.text(messages, tools)
            spans = self._find_by_header(
                self._mask_quoted_markers(text, messages, tools), len(text)
            )
        return text, spans if len(spans) == num_turns and self._keeps_earlier_text else []

    def _is_obvious_turn(self, turn: str, messages: Sequence[Message], index: int) -> bool:
        """Returns whether a text has all parts of the turn, and nothing of the next message.

        Otherwise it may still be the turn, since a template may trim, escape or drop parts of it.
        """
        message, header = messages[index], self._template.header
        parts = [plain_text(message).strip()]
        if self._template.include_thinking:
            parts.append(thinking_of(message).strip())
        after = plain_text(messages[index + 1]).strip() if index + 1 < len(messages) else ""
        is_alone = not (after and after in turn) and not (header and header in turn)
        return is_alone and all(part in turn for part in parts) and _has_calls(turn, message)

    def _find_exact(
        self,
        text: str,
        span: Span | None,
        conversation: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Span | None:
        """Returns the span of the last turn of `conversation` in `text`.

        Returns None if the text does not have the turn as the model writes it. `span` is the likely
        span of the turn; None if it is unknown.
        """
        last_turn = self.last_turn(conversation, tools)
        # An earlier turn may lack the empty thinking block with which a last turn begins.
        prefix = self._template.last_turn_prefix
        prefix = prefix if prefix.strip() else ""
        if span is not None and last_turn.turn in (turn := text[slice(*span)], prefix + turn):
            return span
        start = len(last_turn.before)
        is_exact = text.startswith(last_turn.before) and text.startswith(last_turn.turn, start)
        return (start, start + len(last_turn.turn)) if is_exact else None

    def last_turn(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> LastTurn:
        """Returns the last turn of a conversation as the model writes it."""
        if self._template.has_generation_tags:
            text, tagged = self._template.text_with_spans(messages, tools)
            if not tagged:
                raise _unclear_turn_error(len(messages) - 1)
            start, end = self._extend_to_end(text, *tagged[-1])
        else:
            before = self._template.text(messages[:-1], tools, add_generation_prompt=True)
            text = self._template.text(messages, tools)
            if not text.startswith(before):
                text = before + self._last_message_text(messages, tools)
            start, end = self._extend_to_end(text, len(before), len(text))
        last_turn = LastTurn(text[:start], text[start:end])
        thinking = thinking_of(messages[-1]).strip() if self._template.include_thinking else ""
        if thinking not in last_turn.turn:
            raise ModelError(
                f"this model's chat template leaves out the thinking of "
                f"messages[{len(messages) - 1}]",
                "set rollout.include_thinking to false, or choose a student that thinks",
            )
        if not self._renders_calls(last_turn, messages, tools):
            raise ModelError(
                f"this model's chat template leaves out the tool calls of "
                f"messages[{len(messages) - 1}], so the model would learn to call nothing",
                "set chat_template (in config.yml: model.chat_template) to chatml or to a .jinja "
                "file, or choose a model whose template renders tool calls",
            )
        return last_turn

    def _renders_calls(
        self, last_turn: LastTurn, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> bool:
        """Returns whether the template writes the tool calls of the last message."""
        if _has_calls(last_turn.turn, messages[-1]):
            return True
        # The turn may mention a tool as often as the message's own texts, some of which the
        # template may leave out. A name that occurs nowhere else decides.
        calls = messages[-1].get("tool_calls") or []
        names = [f"called_{number}_{uuid4().hex}" for number in range(len(calls))]
        renamed = [
            {**call, "function": {**call["function"], "name": name}}
            for call, name in zip(calls, names, strict=True)
        ]
        text = self._template.text(
            [*messages[:-1], cast("Message", {**messages[-1], "tool_calls": renamed})], tools
        )
        return all(name in text for name in names)

    def _last_message_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Returns the text that the last message adds if earlier messages have no thinking."""
        bare = [*map(without_thinking, messages[:-1]), messages[-1]]
        before = self._template.text(bare[:-1], tools, add_generation_prompt=True)
        text = self._template.text(bare, tools)
        if not text.startswith(before):
            raise _unclear_turn_error(len(messages) - 1)
        return text[len(before) :]

    @cached_property
    def _keeps_earlier_text(self) -> bool:
        """Whether the template leaves the text before a turn unchanged when a turn is added."""
        for num_before, messages, tools in _probe_conversations():
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

    def _mask_quoted_markers(
        self, text: str, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> str:
        """Returns the text with the turn markers that messages quote replaced by x.

        Quoted markers must not be mistaken for turns. The length of the text does not change, so
        that spans in the result are spans in `text`.
        """
        masked = [_mask_markers(message, self._marker_pattern) for message in messages]
        schemas = [_mask_markers(tool, self._marker_pattern) for tool in tools]
        if masked == list(messages) and schemas == list(tools):
            return text
        return self._template.text(masked, schemas)

    @cached_property
    def _marker_pattern(self) -> re.Pattern[str]:
        """The pattern of texts that could be mistaken for the header or the end of a turn."""
        header = self._template.header
        markers = {token for token in self._template.control_tokens if token in header}
        markers |= {header.strip(), self._template.end_of_turn} - {""}
        return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))

    def _find_by_header(self, text: str, length: int) -> list[Span]:
        """Returns the spans from each header to the next end-of-turn token.

        Returns an empty list if masking has changed the `length` of the text.
        """
        header, end_of_turn = self._template.header, self._template.end_of_turn
        spans: list[Span] = []
        if not header or len(text) != length:
            return spans
        position = text.find(header)
        while position >= 0:
            start = position + len(header)
            end = text.find(end_of_turn, start)
            if end < 0:
                break
            spans.append((start, end + len(end_of_turn)))
            position = text.find(header, end)
        return spans

    def _extend_to_end(self, text: str, start: int, end: int) -> Span:
        """Returns the span with its end moved to the end of the turn's end-of-turn token."""
        end_of_turn = self._template.end_of_turn
        inside = text.rfind(end_of_turn, start, end)
        if inside >= 0 and self._is_blank(text[inside + len(end_of_turn) : end]):
            return start, inside + len(end_of_turn)
        after = text.find(end_of_turn, end)
        if after >= 0 and not text[end:after].strip():
            return start, after + len(end_of_turn)
        # A tool call may end with another control token.
        turn = text[start:end].rstrip()
        is_ended = any(turn.endswith(token) for token in self._template.control_tokens)
        return (start, start + len(turn)) if is_ended else (start, end)

    def _is_blank(self, text: str) -> bool:
        """Returns whether a text has only whitespace and control tokens."""
        for token in self._template.control_tokens:
            text = text.replace(token, "")
        return not text.strip()


def _probe_conversations() -> Iterator[tuple[int, list[Message], list[ToolSchema]]]:
    """Yields `(num_before, messages, tools)`; an assistant turn follows `num_before` messages."""
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


def _unclear_turn_error(index: int) -> ModelError:
    return ModelError(
        f"the assistant's turn in messages[{index}] cannot be distinguished from the rest "
        "in this model's chat template",
        "mark the assistant's turns in chat_template.jinja with {% generation %} … "
        "{% endgeneration %}",
    )


def _has_calls(turn: str, message: Message) -> bool:
    """Returns whether the text of a turn has the name of each tool that the message calls.

    Mentions of a tool in the message's content and thinking do not count.
    """
    parts = (plain_text(message).strip(), thinking_of(message).strip())
    texts = [part for part in parts if part in turn]
    names = [call["function"]["name"] for call in message.get("tool_calls") or []]
    return all(turn.count(name) > sum(text.count(name) for text in texts) for name in names)


def _mask_markers(value: Any, markers: re.Pattern[str]) -> Any:
    """Returns the value with each marker in its strings replaced by x of the same length."""
    if isinstance(value, str):
        return markers.sub(lambda match: "x" * len(match[0]), value)
    if isinstance(value, dict):
        return {
            key: _mask_markers(item, markers) for key, item in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        return [_mask_markers(item, markers) for item in cast("list[Any]", value)]
    return value

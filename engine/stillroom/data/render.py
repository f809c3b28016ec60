"""A conversation becomes tokens: the prompt to answer, the reply to tools, the mask to train on.

Text is encoded in the pieces in which it comes about when the model is sampled (everything up to
the assistant's header, then the assistant's turn, then the tools' replies), so a rendered training
row has the very tokens the model would see and write.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from stillroom.errors import ModelError
from stillroom.types import Message, ToolSchema

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE: list[Message] = [{"role": "user", "content": "x"}]
_SENTINEL = "0123456789"
_THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which transformers hands thinking to a template."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as tokens; `trained` is True on the assistant's tokens and end of turn."""

    text: str
    ids: list[int]
    trained: list[bool]


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template.

    `tokenizer` is a transformers tokenizer. Raises ModelError where the template does not allow
    an exact answer.
    """

    def __init__(self, tokenizer: Any, *, include_thinking: bool = False) -> None:
        self._tokenizer = tokenizer
        self._include_thinking = include_thinking

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Returns the tokens of the conversation so far and the header of the answer to come."""
        return self._encode(self._text(messages, tools, add_generation_prompt=True))

    def reply_ids(
        self,
        call: Message,
        replies: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int]:
        """Returns the tokens that follow an assistant's turn: the replies to it, the next header.

        They begin right after the turn's end-of-turn token, so they can be appended to sampled
        tokens without encoding those again. After a turn that calls no tool it is the user who
        replies; what the model thought before stays in front of it, also where its template would
        leave that out.
        """
        if not call.get("tool_calls"):
            return self._encode(self._after_answer(replies, tools))
        # Some templates give the last turn an empty thinking block, which a reply then takes away.
        for turn in (_stand_in(call, thinking="x"), _stand_in(call)):
            before = self._text([*_PROBE, turn], tools, include_thinking=True)
            after = self._text(
                [*_PROBE, turn, *replies],
                tools,
                add_generation_prompt=True,
                include_thinking=True,
            )
            end = before.rfind(self.end_of_turn)
            if after.startswith(before) and end >= 0:
                return self._encode(after[end + len(self.end_of_turn) :])
        raise ModelError(
            "this model's chat template rewrites earlier turns when tools reply, so the tokens "
            "of a tool conversation cannot be continued exactly",
            "use a model whose template only appends, or run without tools",
        )

    def _after_answer(self, replies: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Returns what the template writes after the end of an answer that a user replies to."""
        answer: Message = {"role": "assistant", "content": _SENTINEL}
        before = self._text(_PROBE, tools)
        after = self._text([*_PROBE, answer, *replies], tools, add_generation_prompt=True)
        end = after.find(self.end_of_turn, after.find(_SENTINEL, len(before)))
        if not after.startswith(before) or end < 0:
            raise ModelError(
                "this model's chat template rewrites what came before when a user replies, so the "
                "tokens of a conversation cannot be continued exactly",
                "use termination_policy last_tool, or a model whose template only appends",
            )
        return after[end + len(self.end_of_turn) :]

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        num_given_turns: int = 0,
    ) -> RenderedConversation:
        """Returns the whole conversation with the mask of what is trained.

        The first `num_given_turns` assistant turns are context and not trained.
        """
        text, spans = self._text_and_spans(messages, tools)
        spans = spans[num_given_turns:]
        ids: list[int] = []
        trained: list[bool] = []
        for start, end, is_trained in _pieces(len(text), spans):
            piece = self._encode(text[start:end])
            ids += piece
            trained += [is_trained] * len(piece)
        if self.decode(ids) != text:
            return self._conversation_by_offsets(text, spans)
        return RenderedConversation(text, ids, trained)

    @cached_property
    def end_of_turn(self) -> str:
        """The text of the special token that ends an assistant's turn, e.g. `<|im_end|>`."""
        answer: Message = {"role": "assistant", "content": _SENTINEL}
        text = self._text([*_PROBE, answer], [])
        tail = text[text.rfind(_SENTINEL) + len(_SENTINEL) :]
        special = [str(t) for t in self._tokenizer.get_added_vocab() if tail.lstrip().startswith(t)]
        if not special:
            raise ModelError(
                "this model's chat template does not end an assistant's turn with a special token",
                "add one to chat_template.jinja, else the model can't learn to stop",
            )
        return max(special, key=len)

    @cached_property
    def header(self) -> str:
        """The text that opens an assistant's turn, e.g. `<|im_start|>assistant` and a newline."""
        before = self._text(_PROBE, [])
        after = self._text(_PROBE, [], add_generation_prompt=True)
        return after[len(before) :] if after.startswith(before) else ""

    def _text_and_spans(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, list[tuple[int, int]]]:
        if _GENERATION_TAG.search(self._tokenizer.chat_template):
            text, spans = self._render(messages, tools, with_spans=True)
            return text, [self._whole_turn(text, start, end) for start, end in spans]
        text = self._text(messages, tools)
        veiled = self._veiled_text(text, messages, tools)
        num_turns = sum(message["role"] == "assistant" for message in messages)
        spans = self._spans_by_header(veiled) if len(veiled) == len(text) else []
        if len(spans) != num_turns:
            spans = self._spans_by_prefix(text, messages, tools)
        return text, spans

    def _veiled_text(
        self, text: str, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> str:
        """Returns the text with letters for header and end of turn where the messages quote them.

        What stands at a place in it stands at the same place in `text`.
        """
        quoted = [_veil(message, self._marks) for message in messages]
        schemas = [_veil(tool, self._marks) for tool in tools]
        if quoted == list(messages) and schemas == list(tools):
            return text
        return self._text(quoted, schemas)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Matches what could be taken for a header or the end of a turn."""
        marks = {token for token in self._control if token in self.header}
        marks |= {self.header.strip(), self.end_of_turn} - {""}
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))

    @cached_property
    def _control(self) -> list[str]:
        return [str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special]

    def _whole_turn(self, text: str, start: int, end: int) -> tuple[int, int]:
        """Makes a span end exactly with its end-of-turn token."""
        size = len(self.end_of_turn)
        inside = text.rfind(self.end_of_turn, start, end)
        if inside >= 0 and self._is_blank(text[inside + size : end]):
            return start, inside + size
        after = text.find(self.end_of_turn, end)
        is_next = after >= 0 and not text[end:after].strip()
        return start, after + size if is_next else end

    def _is_blank(self, text: str) -> bool:
        """Returns whether there is nothing but blanks and control tokens."""
        for token in self._control:
            text = text.replace(token, "")
        return not text.strip()

    def _spans_by_header(self, text: str) -> list[tuple[int, int]]:
        """Finds the assistant's turns by the header before and the token after them."""
        spans: list[tuple[int, int]] = []
        if not self.header:
            return spans
        at = text.find(self.header)
        while at >= 0:
            start = at + len(self.header)
            end = text.find(self.end_of_turn, start)
            if end < 0:
                break
            spans.append((start, end + len(self.end_of_turn)))
            at = text.find(self.header, end)
        return spans

    def _spans_by_prefix(
        self, text: str, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> list[tuple[int, int]]:
        """Finds each assistant's turn as what it adds to the conversation before it."""
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:index], tools, add_generation_prompt=True)
            upto = self._text(messages[: index + 1], tools)
            if not (text.startswith(upto) and upto.startswith(before)):
                raise ModelError(
                    f"the assistant's turn in messages[{index}] cannot be told apart from the rest "
                    "in this model's chat template",
                    "mark it in chat_template.jinja with {% generation %} … {% endgeneration %}",
                )
            spans.append(self._whole_turn(text, len(before), len(upto)))
        return spans

    def _conversation_by_offsets(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> RenderedConversation:
        """Encodes the text at once, for tokenizers whose pieces do not add up to the whole."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [
            any(start <= first and last <= end for start, end in spans) and first < last
            for first, last in encoded["offset_mapping"]
        ]
        return RenderedConversation(text, list(encoded["input_ids"]), trained)

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        add_generation_prompt: bool = False,
        include_thinking: bool | None = None,
    ) -> str:
        return self._render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            include_thinking=include_thinking,
        )[0]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        add_generation_prompt: bool = False,
        include_thinking: bool | None = None,
        with_spans: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        is_kept = self._include_thinking if include_thinking is None else include_thinking
        prepared = [_for_template(message, include_thinking=is_kept) for message in messages]
        try:
            rendered: Any = render_jinja_template(
                [prepared],
                tools=cast("list[Any]", list(tools)) or None,
                chat_template=self._tokenizer.chat_template,
                return_assistant_tokens_mask=with_spans,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(
                f"the model's chat template refuses this conversation: {error}",
                "check the order of the roles; some templates take no system or tool messages",
            ) from error
        texts, spans = rendered
        return texts[0], [(start, end) for start, end in spans[0]] if with_spans else []

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _pieces(length: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Returns the whole text as pieces `(start, end, is_trained)`."""
    pieces: list[tuple[int, int, bool]] = []
    at = 0
    for start, end in spans:
        pieces += [(at, start, False), (start, end, True)]
        at = end
    return [piece for piece in [*pieces, (at, length, False)] if piece[0] < piece[1]]


def _stand_in(call: Message, *, thinking: str | None = None) -> Message:
    """Returns a turn with the same calls; for what follows only their names and ids can matter."""
    stand_in: Message = {"role": "assistant", "content": ""}
    if thinking is not None:
        stand_in["reasoning_content"] = thinking
    stand_in["tool_calls"] = [
        {
            "id": made["id"],
            "type": "function",
            "function": {"name": made["function"]["name"], "arguments": "{}"},
        }
        for made in call.get("tool_calls", [])
    ]
    return stand_in


def _veil(value: Any, marks: re.Pattern[str]) -> Any:
    """Returns the value with as many letters for every mark in its texts."""
    if isinstance(value, str):
        return marks.sub(lambda found: "x" * len(found[0]), value)
    if isinstance(value, dict):
        return {key: _veil(held, marks) for key, held in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_veil(held, marks) for held in cast("list[Any]", value)]
    return value


def _for_template(message: Message, *, include_thinking: bool) -> dict[str, Any]:
    """Returns the message as chat templates expect it: arguments as objects, text as a string."""
    prepared: dict[str, Any] = dict(message)
    prepared["content"] = plain_text(message)
    if not include_thinking:
        for name in _THINKING_FIELDS:
            prepared.pop(name, None)
    if message.get("tool_calls"):
        prepared["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}}
            for call in message.get("tool_calls", [])
        ]
    return prepared


def _arguments(call: Any) -> Any:
    written = call["function"]["arguments"]
    try:
        value = json.loads(written)
    except ValueError:
        return written
    return value if isinstance(value, dict) else written


def plain_text(message: Message) -> str:
    """Returns a message's content as text; a list of parts is joined.

    Raises ModelError for parts that are not text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise ModelError(
                f"a message holds a part of type {part.get('type')!r}; only text can be rendered",
                "leave images and audio out of the rows",
            )
        texts.append(str(part.get("text", "")))
    return "".join(texts)

"""Renders conversations as tokens: prompts, tool replies, and rows with a training mask.

Text is encoded in the same pieces as in sampling: everything up to the assistant's header, the
assistant's turn, the tools' replies, and so on. So a rendered training row has exactly the tokens
that the model would read and write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.data.chat.template import PROBE, SENTINEL, ChatTemplate
from stillroom.data.chat.turns import Span, TurnFinder
from stillroom.data.tool_names import NamedTools, named_schemas
from stillroom.errors import ModelError
from stillroom.types import Message, ToolSchema, is_trained_turn


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as tokens; `trained` is True for trained turns with their end token."""

    text: str
    ids: list[int]
    trained: list[bool]


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template.

    `tokenizer` is a transformers tokenizer; `variables` are the template's variables other than the
    conversation. The methods raise ModelError if the template makes exact tokens impossible.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        include_thinking: bool = False,
        variables: Mapping[str, Any] | None = None,
        named_tools: NamedTools | None = None,
    ) -> None:
        """`named_tools` are the schemas for rows with tool names."""
        self._tokenizer, self._named_tools = tokenizer, named_tools
        self._template = ChatTemplate(
            tokenizer, include_thinking=include_thinking, variables=variables
        )
        self._turns = TurnFinder(self._template)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Returns the tokens of a conversation and the header of the next assistant turn."""
        return self._encode(self._template.text(messages, tools, add_generation_prompt=True))

    def reply_ids(
        self,
        turn: Message,
        replies: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int]:
        """Returns the tokens between two assistant turns: the replies and the next header.

        They begin right after the end-of-turn token of `turn`, the first of the two, so they can be
        appended to sampled tokens, which are not encoded again. If the turn has no tool calls, the
        replies are the user's; earlier thinking of the model then stays in the context, even if its
        template would drop it.
        """
        if not turn.get("tool_calls"):
            return self._encode(self._text_after_answer(replies, tools))
        # Some templates give the last turn an empty thinking block, but drop it once tools reply.
        # A turn with thinking has no such block, so it is tried first.
        for placeholder in (_placeholder(turn, thinking="x"), _placeholder(turn)):
            before = self._template.text([*PROBE, placeholder], tools, include_thinking=True)
            after = self._template.text(
                [*PROBE, placeholder, *replies],
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

    def _text_after_answer(self, replies: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Returns the text that the template adds after an answer to which the user replies."""
        answer: Message = {"role": "assistant", "content": SENTINEL}
        before = self._template.text(PROBE, tools)
        after = self._template.text([*PROBE, answer, *replies], tools, add_generation_prompt=True)
        end = after.find(self.end_of_turn, after.find(SENTINEL, len(before)))
        if not after.startswith(before) or end < 0:
            raise ModelError(
                "this model's chat template rewrites earlier turns when a user replies, so the "
                "tokens of a conversation cannot be continued exactly",
                "use termination_policy last_tool, or a model whose template only appends",
            )
        return after[end + len(self.end_of_turn) :]

    def turn_text(self, turn: Message, tools: Sequence[ToolSchema]) -> str:
        """Returns the text of an assistant turn as the model writes it, with its end token."""
        return self._turns.last_turn([*PROBE, turn], tools).turn

    def reply_text(
        self, turn: Message, replies: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> str:
        """Returns the text between two assistant turns: the replies and the next header.

        Unlike the text of `reply_ids`, it begins after any control token that ends the first turn.
        """
        placeholder = _placeholder(turn) if turn.get("tool_calls") else turn
        last_turn = self._turns.last_turn([*PROBE, placeholder], tools)
        after = self._template.text(
            [*PROBE, placeholder, *replies],
            tools,
            add_generation_prompt=True,
            include_thinking=True,
        )
        conversation = last_turn.before + last_turn.turn
        if after.startswith(conversation):
            return after[len(conversation) :]
        # The template may end a last turn with another token than an earlier one.
        body = conversation.removesuffix(self.end_of_turn)
        added = after[len(body) :]
        ends = [token for token in self._template.control_tokens if added.startswith(token)]
        if after.startswith(body) and body != conversation and ends:
            return added[len(max(ends, key=len)) :]
        raise ModelError(
            "this model's chat template rewrites earlier turns when a user or tool replies, so a "
            "conversation cannot be rendered turn by turn",
            "use a teacher whose template only appends",
        )

    def sequences(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        num_given_turns: int = 0,
    ) -> list[RenderedConversation]:
        """Returns the fewest token sequences that train each turn exactly as the model writes it.

        One sequence is enough unless the template changes an earlier turn when the conversation
        continues, e.g. drops its thinking. Such a turn is trained in a sequence that ends with it,
        or with a later turn that leaves it unchanged, and is context in the other sequences.
        The first `num_given_turns` assistant turns and those with `weight` 0 are never trained. If
        such a turn comes after the last trained one, the messages after the last trained turn are
        left out.
        """
        if any(isinstance(tool, str) for tool in tools):
            tools = named_schemas(tools, self._named_tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        remaining = [i for i in turns[num_given_turns:] if is_trained_turn(messages[i])]
        if not remaining:
            return [self._encode_spans(self._template.text(messages, tools), [])]
        end = len(messages) if remaining[-1] == turns[-1] else remaining[-1] + 1
        rendered: list[RenderedConversation] = []
        while remaining:
            text, spans = self._turns.find(messages[:end], tools, remaining)
            unchanged = [index for index in remaining if index in spans]
            if unchanged:
                rendered.append(self._encode_spans(text, [spans[index] for index in unchanged]))
            elif end == remaining[-1] + 1:
                raise _rewritten_error(remaining[-1])
            remaining = [index for index in remaining if index not in spans]
            end = remaining[-1] + 1 if remaining else 0
        return rendered[::-1]

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        num_given_turns: int = 0,
    ) -> RenderedConversation:
        """Returns the whole conversation as one sequence, with its training mask.

        Raises ModelError if the conversation needs several sequences; see `sequences`.
        """
        rendered = self.sequences(messages, tools, num_given_turns=num_given_turns)
        if len(rendered) > 1:
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            raise _rewritten_error(turns[num_given_turns])
        return rendered[0]

    @property
    def end_of_turn(self) -> str:
        """The text of the special token that ends an assistant's turn, e.g. `<|im_end|>`."""
        return self._template.end_of_turn

    @property
    def header(self) -> str:
        """The text before an assistant's turn, e.g. `<|im_start|>assistant` and a newline."""
        return self._template.header

    def decode(self, ids: list[int]) -> str:
        """Returns the text of tokens, including special tokens."""
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _encode_spans(self, text: str, spans: Sequence[Span]) -> RenderedConversation:
        ids: list[int] = []
        trained: list[bool] = []
        for start, end, is_trained in _pieces(len(text), spans):
            piece = self._encode(text[start:end])
            ids += piece
            trained += [is_trained] * len(piece)
        if self.decode(ids) != text:
            return self._encode_by_offsets(text, spans)
        return RenderedConversation(text, ids, trained)

    def _encode_by_offsets(self, text: str, spans: Sequence[Span]) -> RenderedConversation:
        """Encodes the text as a whole, for tokenizers that do not reproduce it from its pieces."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [
            any(start <= begin and end <= stop for start, stop in spans) and begin < end
            for begin, end in encoded["offset_mapping"]
        ]
        return RenderedConversation(text, list(encoded["input_ids"]), trained)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _pieces(length: int, spans: Sequence[Span]) -> list[tuple[int, int, bool]]:
    """Divides a text into pieces `(start, end, is_trained)`; the spans are the trained pieces."""
    pieces: list[tuple[int, int, bool]] = []
    position = 0
    for start, end in spans:
        pieces += [(position, start, False), (start, end, True)]
        position = end
    return [piece for piece in [*pieces, (position, length, False)] if piece[0] < piece[1]]


def _rewritten_error(index: int) -> ModelError:
    return ModelError(
        f"this model's chat template renders messages[{index}] differently once the conversation "
        "continues, so the row is not one sequence of tokens",
        "leave thinking out (rollout.include_thinking: false), or end the row with that turn",
    )


def _placeholder(turn: Message, *, thinking: str | None = None) -> Message:
    """Returns a turn with the same tool calls, but without text and arguments.

    Templates render the messages after a turn by the names and ids of its calls only.
    """
    placeholder: Message = {"role": "assistant", "content": ""}
    if thinking is not None:
        placeholder["reasoning_content"] = thinking
    placeholder["tool_calls"] = [
        {
            "id": tool_call["id"],
            "type": "function",
            "function": {"name": tool_call["function"]["name"], "arguments": "{}"},
        }
        for tool_call in turn.get("tool_calls", [])
    ]
    return placeholder

"""Renders conversations as tokens: prompts, the replies of tools, and rows with a training mask.

Text is encoded in the same pieces as in sampling: everything up to the assistant's header, then the
assistant's turn, then the tools' replies. So a rendered training row has exactly the tokens that
the model would read and write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.data.chat.template import PROBE, SENTINEL, ChatTemplate, plain_text
from stillroom.data.chat.turns import Span, TurnFinder
from stillroom.data.tool_names import NamedTools, named_schemas
from stillroom.errors import ModelError
from stillroom.types import Message, ToolSchema, is_trained_turn

__all__ = ["ChatRenderer", "RenderedConversation", "plain_text"]


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as tokens; `trained` is True for tokens of trained turns, ends included."""

    text: str
    ids: list[int]
    trained: list[bool]


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template.

    `tokenizer` is a transformers tokenizer; `variables` are those that its template reads apart
    from the conversation. The methods raise ModelError if the template makes exact tokens
    impossible.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        include_thinking: bool = False,
        variables: Mapping[str, Any] | None = None,
        named_tools: NamedTools | None = None,
    ) -> None:
        """`named_tools` are the schemas for rows that name their tools."""
        self._tokenizer, self._named_tools = tokenizer, named_tools
        self._template = ChatTemplate(
            tokenizer, include_thinking=include_thinking, variables=variables
        )
        self._turns = TurnFinder(self._template)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Returns the tokens of a conversation, followed by the header of the next answer."""
        return self._encode(self._template.text(messages, tools, add_generation_prompt=True))

    def reply_ids(
        self,
        call: Message,
        replies: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int]:
        """Returns the tokens between an assistant's turn and the next: the replies and a header.

        `call` is the turn. The tokens begin right after its end-of-turn token, so they can be
        appended to sampled tokens, which need not be encoded again. If it has no tool calls, the
        replies are the user's; the model's earlier thinking then stays in the context, even if its
        template would drop it.
        """
        if not call.get("tool_calls"):
            return self._encode(self._after_answer(replies, tools))
        # Some templates give the last turn an empty thinking block, but drop it once tools reply,
        # so a turn with thinking is tried first.
        for turn in (_stand_in(call, thinking="x"), _stand_in(call)):
            before = self._template.text([*PROBE, turn], tools, include_thinking=True)
            after = self._template.text(
                [*PROBE, turn, *replies],
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
        """Returns the text that the template puts after an answer when the user replies to it."""
        answer: Message = {"role": "assistant", "content": SENTINEL}
        before = self._template.text(PROBE, tools)
        after = self._template.text([*PROBE, answer, *replies], tools, add_generation_prompt=True)
        end = after.find(self.end_of_turn, after.find(SENTINEL, len(before)))
        if not after.startswith(before) or end < 0:
            raise ModelError(
                "this model's chat template rewrites what came before when a user replies, so the "
                "tokens of a conversation cannot be continued exactly",
                "use termination_policy last_tool, or a model whose template only appends",
            )
        return after[end + len(self.end_of_turn) :]

    def turn_text(self, turn: Message, tools: Sequence[ToolSchema]) -> str:
        """Returns the text of an assistant's turn as the model writes it, its end included."""
        return self._turns.written([*PROBE, turn], tools).turn

    def reply_text(
        self, turn: Message, replies: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> str:
        """Returns the text between an assistant's turn and the next: the replies and a header.

        Unlike `reply_ids` it begins after whatever ends this turn, which may be a mark of its own.
        """
        stand_in = _stand_in(turn) if turn.get("tool_calls") else turn
        written = self._turns.written([*PROBE, stand_in], tools)
        after = self._template.text(
            [*PROBE, stand_in, *replies], tools, add_generation_prompt=True, include_thinking=True
        )
        whole = written.before + written.turn
        if after.startswith(whole):
            return after[len(whole) :]
        # The end of the last turn may differ from that of an earlier one.
        body = whole.removesuffix(self.end_of_turn)
        rest = after[len(body) :]
        marks = [mark for mark in self._template.control if rest.startswith(mark)]
        if after.startswith(body) and body != whole and marks:
            return rest[len(max(marks, key=len)) :]
        raise ModelError(
            "this model's chat template rewrites earlier turns when others reply, so it cannot "
            "read a conversation piece by piece",
            "use a teacher whose template only appends",
        )

    def sequences(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        num_given_turns: int = 0,
    ) -> list[RenderedConversation]:
        """Returns as few token sequences as can train each turn exactly as the model must write it.

        One sequence is enough unless the template changes an earlier turn once the conversation
        continues, e.g. drops its thinking. Such a turn is trained in a sequence that ends with it
        or with a later turn after which it is still unchanged. In other sequences it is context.
        The first `num_given_turns` assistant turns are context everywhere and not trained, as are
        those with `weight` 0. What follows the last trained turn only because such a turn is there
        is left out.
        """
        if any(isinstance(tool, str) for tool in tools):
            tools = named_schemas(tools, self._named_tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        untrained = [i for i in turns[num_given_turns:] if is_trained_turn(messages[i])]
        if not untrained:
            return [self._encoded(self._template.text(messages, tools), [])]
        end = len(messages) if untrained[-1] == turns[-1] else untrained[-1] + 1
        rendered: list[RenderedConversation] = []
        while untrained:
            text, spans = self._turns.find(messages[:end], tools, untrained)
            whole = [index for index in untrained if index in spans]
            if whole:
                rendered.append(self._encoded(text, [spans[index] for index in whole]))
            elif end == untrained[-1] + 1:
                raise _rewritten(untrained[-1])
            untrained = [index for index in untrained if index not in spans]
            end = untrained[-1] + 1 if untrained else 0
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
            raise _rewritten(turns[num_given_turns])
        return rendered[0]

    @property
    def end_of_turn(self) -> str:
        """The text of the special token that ends an assistant's turn, e.g. `<|im_end|>`."""
        return self._template.end_of_turn

    @property
    def header(self) -> str:
        """The text that opens an assistant's turn, e.g. `<|im_start|>assistant` and a newline."""
        return self._template.header

    def decode(self, ids: list[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _encoded(self, text: str, spans: Sequence[Span]) -> RenderedConversation:
        ids: list[int] = []
        trained: list[bool] = []
        for start, end, is_trained in _pieces(len(text), spans):
            piece = self._encode(text[start:end])
            ids += piece
            trained += [is_trained] * len(piece)
        if self.decode(ids) != text:
            return self._encoded_by_offsets(text, spans)
        return RenderedConversation(text, ids, trained)

    def _encoded_by_offsets(self, text: str, spans: Sequence[Span]) -> RenderedConversation:
        """Encodes the text as a whole, for tokenizers whose decoded pieces do not add up to it."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [
            any(start <= begin and end <= stop for start, stop in spans) and begin < end
            for begin, end in encoded["offset_mapping"]
        ]
        return RenderedConversation(text, list(encoded["input_ids"]), trained)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _pieces(length: int, spans: Sequence[Span]) -> list[tuple[int, int, bool]]:
    """Divides a text of this length into pieces `(start, end, is_trained)`; spans are trained."""
    pieces: list[tuple[int, int, bool]] = []
    at = 0
    for start, end in spans:
        pieces += [(at, start, False), (start, end, True)]
        at = end
    return [piece for piece in [*pieces, (at, length, False)] if piece[0] < piece[1]]


def _rewritten(index: int) -> ModelError:
    return ModelError(
        f"this model's chat template renders messages[{index}] differently once the conversation "
        "continues, so the row is not one sequence of tokens",
        "leave thinking out (rollout.include_thinking: false), or end the row with that turn",
    )


def _stand_in(call: Message, *, thinking: str | None = None) -> Message:
    """Returns a turn with the same calls, but no text and no arguments.

    Only the names and ids of a turn's calls can change how a template renders what follows it.
    """
    stand_in: Message = {"role": "assistant", "content": ""}
    if thinking is not None:
        stand_in["reasoning_content"] = thinking
    stand_in["tool_calls"] = [
        {
            "id": tool_call["id"],
            "type": "function",
            "function": {"name": tool_call["function"]["name"], "arguments": "{}"},
        }
        for tool_call in call.get("tool_calls", [])
    ]
    return stand_in

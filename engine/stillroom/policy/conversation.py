"""One conversation of a policy: its exact tokens, and its turns as messages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.tool_calls import message_from_text, parser_for
from stillroom.models.load import LoadedModel
from stillroom.policy.sequences import FinishReason, TokenHistory
from stillroom.types import Message, PartialTurn, SampledTurn, TokenTrace, ToolSchema, Usage


class TokenConversation(ABC):
    """A conversation that is held as its exact tokens; its subclasses sample its turns."""

    def __init__(
        self,
        history: TokenHistory,
        loaded: LoadedModel,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> None:
        self._history, self._renderer, self._tools = history, renderer, tools
        self._parser = parser_for(loaded.tokenizer.chat_template) if tools else None
        self._stop_ids = loaded.stop_ids
        self._turn_start = self._num_turns = self._num_calls = 0
        history.append_given(renderer.prompt_ids(messages, tools))

    @abstractmethod
    async def sample(self) -> SampledTurn:
        """Returns the model's next turn.

        Raises:
            CallFailedError: every attempt failed.
            SamplingStoppedError: sampling stopped before the turn's end; its tokens are
            `partial_turn`.
        """

    def add_responses(self, turn: Message, responses: Sequence[Message]) -> None:
        """Appends the tool results, or a user's message, that follow the last turn, `turn`."""
        self._history.append_given(self._renderer.reply_ids(turn, responses, self._tools))

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that was sampled in an earlier process, instead of sampling it."""
        self._count_turn(turn.message)
        self._history.restore(turn.token_ids or [], turn.logprobs or [])

    def add_turn(self, turn: SampledTurn) -> None:
        """Appends the exact tokens of a turn that another policy sampled, as given tokens."""
        self._count_turn(turn.message)
        self._history.append_given(turn.token_ids or [])

    def resume_turn(self, partial: PartialTurn) -> None:
        """Sets the first tokens of the next turn, and skips the random numbers that they used."""
        self._history.restore(partial.ids, partial.logprobs)
        self._history.num_partial = len(partial.ids)

    def partial_turn(self) -> PartialTurn:
        """Returns the partial turn's tokens, if sampling was stopped within a turn."""
        history, start = self._history, self._turn_start
        return PartialTurn(ids=history.ids[start:], logprobs=history.logprobs[start:])

    def limit_turn(self, max_tokens: int) -> None:
        """Limits later turns to `max_tokens`, if that is below the settings' limit."""
        settings = self._history.settings
        limit = min(max_tokens, settings.max_tokens)
        self._history.settings = msgspec.structs.replace(settings, max_tokens=limit)

    @abstractmethod
    def set_aside(self) -> None:
        """Lets other conversations continue without this one, which will not need a turn soon."""

    def trace(self) -> TokenTrace | None:
        """Returns the conversation's tokens so far."""
        return self._history.trace()

    def _start_turn(self) -> int:
        """Starts a turn, and returns the number of tokens before it.

        Tokens that `resume_turn` set belong to the turn.
        """
        self._turn_start = len(self._history.ids) - self._history.num_partial
        return self._turn_start

    def _finished_turn(self, reason: FinishReason) -> SampledTurn:
        """Returns the turn that has just been sampled; its message omits the end-of-turn token."""
        start = self._turn_start
        ids = self._history.ids[start:]
        visible = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        message = message_from_text(
            self._renderer.decode(visible),
            self._parser,
            first_call=self._num_calls,
            is_thinking=self._renderer.header.rstrip().endswith("<think>"),
        )
        self._count_turn(message)
        return SampledTurn(
            message=message,
            finish_reason=reason,
            usage=Usage(prompt_tokens=start, completion_tokens=len(ids)),
            token_ids=ids,
            logprobs=self._history.logprobs[start:],
        )

    def _count_turn(self, message: Message) -> None:
        """Counts a turn and its tool calls, which are numbered across all turns."""
        self._num_turns += 1
        self._num_calls += len(message.get("tool_calls", []))

"""Reads a conversation's sampled tokens as messages, with the tool calls in them."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from stillroom.data.chat.render import ChatRenderer
from stillroom.policy.tool_calls import Parser, message_from_text
from stillroom.types import Message, SampledTurn


class TurnReader:
    """Reads the turns of one conversation, and numbers its tool calls across all turns."""

    def __init__(
        self, renderer: ChatRenderer, parser: Parser | None, stop_ids: AbstractSet[int]
    ) -> None:
        self._renderer, self._parser, self._stop_ids = renderer, parser, stop_ids
        self._num_calls = 0

    def read(self, ids: Sequence[int]) -> Message:
        """Returns the message of a sampled turn, without the token that ends the turn."""
        shown = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        message = message_from_text(
            self._renderer.decode(list(shown)),
            self._parser,
            first_call=self._num_calls,
            is_thinking=self._renderer.header.rstrip().endswith("<think>"),
        )
        self._count(message)
        return message

    def count_calls(self, turn: SampledTurn) -> None:
        """Counts the calls of a turn that was read elsewhere or earlier."""
        self._count(turn.message)

    def _count(self, message: Message) -> None:
        self._num_calls += len(message.get("tool_calls", []))

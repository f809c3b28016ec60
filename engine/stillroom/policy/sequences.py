"""One conversation as a decode engine sees it: given and sampled tokens, and where it stands."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stillroom.types import SamplingSettings, TokenTrace

FinishReason = Literal["stop", "length", "context"]


@dataclass(slots=True, eq=False)
class DecodedSequence:
    """One conversation's tokens and where it stands."""

    settings: SamplingSettings
    draws: random.Random
    """Its own source of randomness, so that what it becomes does not depend on its neighbours."""
    ids: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    """Nats at temperature 1; 0.0 for given tokens."""
    pending: list[int] = field(default_factory=list[int])
    """Tokens that are part of `ids` but not yet in the cache."""
    num_cached: int = 0
    turn_start: int = 0
    num_begun: int = 0
    """Tokens at the end that are the beginning of the next turn, from before it was stopped."""
    slot: int | None = None
    is_new: bool = True
    """Whether none of its tokens has been run yet."""
    is_paused: bool = True
    finish_reason: FinishReason | None = None

    def give(self, ids: Sequence[int]) -> None:
        """Appends given tokens (a prompt, the replies of tools)."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.pending += ids

    def restore(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Appends a turn that was sampled in an earlier process; its draws count as drawn."""
        self.ids += ids
        self.sampled += [True] * len(ids)
        self.logprobs += logprobs
        self.pending += ids
        for _ in ids:
            self.draws.random()

    def begin_turn(self) -> None:
        """Makes the next token one of a new turn: the first, but for tokens it has already."""
        self.turn_start = len(self.ids) - self.num_begun
        self.num_begun = 0
        self.finish_reason = None
        self.is_paused = False

    def end_turn(self, reason: FinishReason) -> None:
        """Pauses until the next turn is asked for."""
        self.finish_reason = reason
        self.is_paused = True

    def take_over(self, num_tokens: int) -> None:
        """Counts its first tokens as cached: another sequence's, which begins alike."""
        self.num_cached = num_tokens
        self.pending = self.ids[num_tokens:]

    def trace(self) -> TokenTrace:
        """Returns the tokens so far, as they stand now."""
        return TokenTrace(
            ids=list(self.ids), sampled=list(self.sampled), logprobs=list(self.logprobs)
        )

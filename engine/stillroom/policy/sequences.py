"""One conversation in the decode engine: its given and sampled tokens, and its state."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stillroom.types import SamplingSettings, TokenTrace

FinishReason = Literal["stop", "length", "context"]


@dataclass(slots=True, eq=False)
class DecodedSequence:
    """One conversation's tokens, and its state in the engine."""

    settings: SamplingSettings
    draws: random.Random
    """Its own source of random numbers, so that its tokens do not depend on other sequences."""
    ids: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    """The tokens' log-probabilities in nats at temperature 1; 0.0 for given tokens."""
    pending: list[int] = field(default_factory=list[int])
    """The last tokens of `ids`, whose keys and values are not in the cache yet."""
    num_cached: int = 0
    turn_start: int = 0
    num_begun: int = 0
    """The number of last tokens that begin the next turn: they were sampled before it was
    stopped."""
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
        """Appends a turn that was sampled earlier, and takes its random numbers from `draws`.

        Thus the tokens that follow are the same as if the turn had been sampled here.
        """
        self.ids += ids
        self.sampled += [True] * len(ids)
        self.logprobs += logprobs
        self.pending += ids
        for _ in ids:
            self.draws.random()

    def begin_turn(self) -> None:
        """Begins a new turn, which keeps its first tokens if it was stopped before."""
        self.turn_start = len(self.ids) - self.num_begun
        self.num_begun = 0
        self.finish_reason = None
        self.is_paused = False

    def end_turn(self, reason: FinishReason) -> None:
        """Ends the turn, and pauses the sequence until its next one begins."""
        self.finish_reason = reason
        self.is_paused = True

    def take_over(self, num_tokens: int) -> None:
        """Counts the first tokens as cached, after they were copied from another sequence."""
        self.num_cached = num_tokens
        self.pending = self.ids[num_tokens:]

    def trace(self) -> TokenTrace:
        """Returns a copy of the tokens so far."""
        return TokenTrace(
            ids=list(self.ids), sampled=list(self.sampled), logprobs=list(self.logprobs)
        )

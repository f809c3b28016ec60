"""One conversation in the decode engine: its given and sampled tokens, and its state."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stillroom.types import SamplingSettings, TokenTrace

FinishReason = Literal["stop", "length", "context"]


@dataclass(eq=False)
class TokenHistory:
    """The exact tokens of a conversation so far, given and sampled."""

    settings: SamplingSettings
    ids: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    """The tokens' log-probabilities in nats at temperature 1; 0.0 for given tokens."""
    num_partial: int = 0
    """The number of last tokens that belong to a turn which was stopped before its end."""

    def append_given(self, ids: Sequence[int]) -> None:
        """Appends given tokens (a prompt, tool replies)."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def restore(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Appends tokens that were sampled earlier or elsewhere."""
        self.ids += ids
        self.sampled += [True] * len(ids)
        self.logprobs += logprobs

    def trace(self) -> TokenTrace:
        """Returns a copy of the tokens so far."""
        return TokenTrace(
            ids=list(self.ids), sampled=list(self.sampled), logprobs=list(self.logprobs)
        )


@dataclass(eq=False)
class DecodedSequence(TokenHistory):
    """One conversation's tokens, and its state in the engine."""

    rng: random.Random = field(kw_only=True)
    """Its own random generator, so that its tokens do not depend on other sequences."""
    num_cached: int = 0
    """The number of tokens, from the first one on, whose keys and values are in the cache."""
    turn_start: int = 0
    """The index of the current turn's first token."""
    slot: int | None = None
    """The index of its slot in the cache; None without one."""
    is_new: bool = True
    """Whether none of its tokens has been run yet."""
    is_paused: bool = True
    """Whether it has no turn to sample: none has begun, or the last one has ended."""
    finish_reason: FinishReason | None = None

    @property
    def pending(self) -> list[int]:
        """The last tokens, which have not been run through the model yet."""
        return self.ids[self.num_cached :]

    @property
    def num_pending(self) -> int:
        """The number of tokens that have not been run through the model yet."""
        return len(self.ids) - self.num_cached

    def restore(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Appends a turn that was sampled earlier, and skips the random numbers that it used.

        Later tokens are then the same as if the turn had been sampled here.
        """
        super().restore(ids, logprobs)
        for _ in ids:
            self.rng.random()

    def begin_turn(self) -> None:
        """Begins a new turn, or continues one that was stopped, with the tokens sampled so far."""
        self.turn_start = len(self.ids) - self.num_partial
        self.num_partial = 0
        self.finish_reason = None
        self.is_paused = False

    def end_turn(self, reason: FinishReason) -> None:
        """Ends the turn, and pauses the sequence until its next one begins."""
        self.finish_reason = reason
        self.is_paused = True

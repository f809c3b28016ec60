"""A teacher's log-probabilities of a student's tokens; this module needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's log-probabilities at the sampled tokens of one rollout, in their order."""

    logprobs: list[float]
    """The log-probability of each sampled token, in nats."""
    top_ids: list[list[int]] | None = None
    """The teacher's most likely tokens at each position, likeliest first; None if not requested."""
    top_logprobs: list[list[float]] | None = None
    """The log-probabilities of `top_ids` in nats; None if not requested."""

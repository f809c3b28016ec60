"""What a teacher says of tokens that a student sampled; needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's log-probabilities (nats) at the sampled tokens of one rollout, in their order."""

    logprobs: list[float]
    """Of the sampled tokens themselves."""
    top_ids: list[list[int]] | None = None
    """The teacher's most likely tokens at each, the likeliest first; None if not asked for."""
    top_logprobs: list[list[float]] | None = None
    """Theirs."""

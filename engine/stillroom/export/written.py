"""What is known of a model once its files are written."""

from dataclasses import dataclass

import msgspec


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """How the files, loaded again, predict what the checkpoint predicts on a few conversations."""

    positions: int
    same_token: float
    """Share of the positions at which the most probable token is the same."""
    kl: float
    """Mean KL(checkpoint || export) in nats."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was found out about the model while it was written."""

    precision: str
    """fp32, bf16 or fp16; auto: whatever its base has."""
    tool_parser: str | None
    """vLLM's name for the format of its tool calls, where it is known."""
    max_context: int | None = None
    parameters: int | None = None
    read_back: ReadBack | None = None
    """None of an adapter, whose files are copies."""

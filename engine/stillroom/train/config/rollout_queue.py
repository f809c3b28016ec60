"""Rollouts that are under way while the student learns: what a checkpoint keeps of them."""

import msgspec

from stillroom.tools.base import ToolResult
from stillroom.types import BegunTurn, SampledTurn


class KnownTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A finished turn, and the tools' replies to it once they are there."""

    turn: SampledTurn
    replies: list[ToolResult] | None = None


class CarriedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that goes on under newer weights, as exact tokens; no cache of older weights."""

    iteration: int
    """In which it began, from 0."""
    index: int
    """Its place among that iteration's rollouts."""
    turns: list[KnownTurn]
    begun: BegunTurn | None = None
    """Of the turn that was being sampled."""

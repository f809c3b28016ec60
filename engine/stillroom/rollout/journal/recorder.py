"""What remembers the finished steps of one rollout, so that none is paid for twice."""

from collections.abc import Sequence
from typing import Protocol

from stillroom.tools.base import ToolResult
from stillroom.types import CallTotals, SampledTurn


class JudgeRecorder(Protocol):
    """Remembers the calls of the judge."""

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Returns the judge's replies that came earlier, those that can't be read too."""
        ...

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps a reply of the judge; called before anything is done with it."""
        ...


class EpisodeRecorder(JudgeRecorder, Protocol):
    """Remembers all of a rollout."""

    def known_turn(self, index: int) -> SampledTurn | None:
        """Returns the turn `index` if it was finished earlier."""
        ...

    def known_replies(self, index: int) -> list[ToolResult] | None:
        """Returns the tools' replies to turn `index` if they came earlier."""
        ...

    def start_over(self) -> None:
        """Drops what is known: the tools' state that it led to is gone."""
        ...

    def dropped(self) -> CallTotals:
        """Returns what was paid for and dropped."""
        ...

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps a finished turn; called before anything is done with it."""
        ...

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Keeps the tools' replies; called before the model sees them."""
        ...


class ForgetfulRecorder:
    """Remembers nothing: for rollouts that cost nothing to do again."""

    def known_turn(self, index: int) -> SampledTurn | None:
        """Knows none."""

    def known_replies(self, index: int) -> list[ToolResult] | None:
        """Knows none."""

    def start_over(self) -> None:
        """Has nothing to drop."""

    def dropped(self) -> CallTotals:
        """Has dropped nothing."""
        return CallTotals()

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps nothing."""

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        """Keeps nothing."""

    def judge_turns(self) -> Sequence[SampledTurn]:
        """Knows none."""
        return ()

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        """Keeps nothing."""

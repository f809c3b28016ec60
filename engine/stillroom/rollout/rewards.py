"""Rewards of a finished conversation: the user's rewards.py, else a match with the known answer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.data.formats import Task
from stillroom.data.render import plain_text
from stillroom.errors import DataError
from stillroom.tools.user_pool import UserPool
from stillroom.types import Message

EXPECTED_ANSWER = "expected_answer"
SUCCESS_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rollout's rewards came to; `total` is None where nothing judges this task."""

    total: float | None
    by_name: Mapping[str, float]

    @property
    def success(self) -> bool | None:
        """Whether the reward reaches 0.5; None where there is no reward."""
        return None if self.total is None else self.total >= SUCCESS_THRESHOLD


class Rewarder:
    """Judges finished conversations."""

    def __init__(self, pool: UserPool | None) -> None:
        self._pool = pool
        self._descriptions = {r.name: r for r in pool.rewards} if pool else {}

    def check(self, tasks: Sequence[Task]) -> None:
        """Raises DataError if a task names a reward that does not exist."""
        for task in tasks:
            unknown = set(task.reward_names or ()) - set(self._descriptions) - {EXPECTED_ANSWER}
            if unknown and self._descriptions:
                raise DataError(
                    f"task {task.task_id} names the reward {min(unknown)!r}, which rewards.py"
                    f" does not have (it has: {', '.join(self._descriptions)})",
                    "add the function with @reward, or take the name out of the row's 'rewards'",
                )

    def can_judge(self, task: Task) -> bool:
        """Returns whether a task will get a reward."""
        return bool(self._names(task))

    async def judge(self, task: Task, messages: list[Message]) -> Judgement:
        """Returns the rewards of a finished conversation; a precondition of 0 makes the sum 0.

        Raises CallFailedError where a reward cannot be computed: that is never a reward of 0.
        """
        by_name: dict[str, float] = {}
        for name in self._names(task):
            if self._pool is not None and name in self._descriptions:
                by_name[name] = await self._pool.reward(
                    name, messages, metadata=task.metadata, variables=task.variables
                )
            else:
                by_name[name] = matches_answer(messages, task.metadata[EXPECTED_ANSWER])
        if not by_name:
            return Judgement(None, {})
        blocked = any(
            by_name[name] == 0
            for name, description in self._descriptions.items()
            if description.precondition and name in by_name
        )
        return Judgement(0.0 if blocked else sum(by_name.values()), by_name)

    def _names(self, task: Task) -> list[str]:
        wanted = task.reward_names
        names = [n for n in self._descriptions if wanted is None or n in wanted]
        is_wanted = not names or EXPECTED_ANSWER in (wanted or ())
        has_answer = task.metadata.get(EXPECTED_ANSWER) is not None
        if has_answer and is_wanted and EXPECTED_ANSWER not in names:
            names.append(EXPECTED_ANSWER)
        return names


def last_answer(messages: Sequence[Message]) -> str:
    """Returns the text of the last assistant message, without thinking; "" if it calls tools."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return "" if message.get("tool_calls") else plain_text(message)
    return ""


def matches_answer(messages: Sequence[Message], expected: Any) -> float:
    """Returns 1.0 if the expected answer stands in the last assistant text as a whole word."""
    wanted, text = _normalised(str(expected)), _normalised(last_answer(messages))
    if not wanted:
        return 0.0
    # 12 must match neither 112 nor 12.5, but "12." at the end of a sentence is fine.
    pattern = rf"(?<![\w.,-]){re.escape(wanted)}(?![\w-]|[.,]\d)"
    return 1.0 if re.search(pattern, text) else 0.0


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split())

"""The rewards of a finished conversation: from rewards.py, the expected answer, or a judge."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.data.chat.tool_calls import has_call_text
from stillroom.data.formats import Task
from stillroom.errors import DataError
from stillroom.rollout.journal.records import JudgeRecorder
from stillroom.rollout.rewards.answers import strip_thinking
from stillroom.rollout.rewards.judge import AnswerJudge, Verdict
from stillroom.rollout.rewards.matchers import (
    AnswerKey,
    AnswerMatch,
    answer_key,
    is_accepted,
    is_only_answer,
)
from stillroom.tools.user.pool import UserPool
from stillroom.types import CallTotals, Message

_EXPECTED_ANSWER = "expected_answer"
JUDGE = "judge"
SUCCESS_THRESHOLD = 0.5
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The rewards of a rollout; `total` is None if no reward applies to its task."""

    total: float | None
    by_name: Mapping[str, float]
    judge: CallTotals | None = None
    """The totals of the judge's calls; None if no judge was called."""
    reasoning: str | None = None
    """The judge's reasoning; None if no judge was called."""
    preconditions: tuple[str, ...] = ()
    """The names of the rewards that are preconditions."""

    @property
    def success(self) -> bool | None:
        """Whether the sum of the rewards reaches 0.5; None if there is no reward.

        A precondition of 0 rules out a success. Other preconditions are left out of the sum, unless
        all rewards are preconditions: a wrong answer that meets them is no success.
        """
        if self.total is None:
            return None
        others = [self.by_name[name] for name in self.by_name if name not in self.preconditions]
        is_failed = any(self.by_name[name] == 0 for name in self.preconditions)
        return not is_failed and (sum(others) if others else self.total) >= SUCCESS_THRESHOLD


class Rewarder:
    """Computes the rewards of finished conversations.

    `match` is the way to compare answers of rows without an answer_match. The functions of
    rewards.py come first. The comparison with the expected answer and the judge are used for tasks
    that no such function judges, and in addition to such functions if the row names them. If a row
    names nothing, the judge is used rather than the comparison.
    """

    def __init__(
        self,
        pool: UserPool | None,
        *,
        judge: AnswerJudge | None = None,
        match: AnswerMatch = AnswerMatch.CONTAINED,
    ) -> None:
        self._pool, self._judge, self._match = pool, judge, match
        self._user_rewards = {r.name: r for r in pool.rewards} if pool else {}

    def check(self, tasks: Sequence[Task], *, is_judge_optional: bool = False) -> None:
        """Raises DataError if a task names an unknown reward, or has an unusable expected answer.

        With `is_judge_optional`, tasks may name a judge that does not exist, and such a task
        may then get no reward.
        """
        available = {*self._user_rewards, _EXPECTED_ANSWER}
        has_judge = self._judge is not None or JUDGE in available
        for task in tasks:
            wanted = set(task.reward_names or ())
            if JUDGE in wanted and not has_judge and not is_judge_optional:
                raise DataError(
                    f"task {task.task_id} names the reward 'judge', but no judge is given",
                    "give judge=judge.yml, or remove the name from the row's 'rewards'",
                )
            unknown = wanted - available - {JUDGE}
            if unknown and self._user_rewards:
                raise DataError(
                    f"task {task.task_id} names the reward {min(unknown)!r}, which rewards.py"
                    f" does not define (it defines: {', '.join(self._user_rewards)})",
                    "add the function with @reward, or remove the name from the row's 'rewards'",
                )
            if _EXPECTED_ANSWER in self._reward_names(task):
                self._answer_key(task)

    def has_reward(self, task: Task) -> bool:
        """Returns whether a task will get a reward."""
        return bool(self._reward_names(task))

    def match_of(self, task: Task) -> AnswerMatch | None:
        """Returns how a task's expected answer is compared; None if something else judges it."""
        key = self._answer_key(task) if _EXPECTED_ANSWER in self._reward_names(task) else None
        return None if key is None else key.match

    def asks_judge(self, task: Task) -> bool:
        """Returns whether the judge is called for a task, unless a precondition decides first."""
        is_named = JUDGE in self._reward_names(task) and JUDGE not in self._user_rewards
        return self._judge is not None and is_named

    def may_skip_judge(self, task: Task) -> bool:
        """Returns whether a precondition of a task's rewards may make a judge call unnecessary."""
        return bool(self._preconditions(self._reward_names(task)))

    async def judge(
        self,
        task: Task,
        messages: list[Message],
        *,
        seed: int | None = None,
        recorder: JudgeRecorder | None = None,
    ) -> Judgement:
        """Returns the rewards of a finished conversation; the total is their sum.

        The total is 0 if a reward that is a precondition is 0. The judge comes last, and is not
        called if a precondition has already made the total 0.
        Raises CallFailedError if a reward cannot be computed: a failure is not a reward of 0.
        """
        by_name: dict[str, float] = {}
        verdict: Verdict | None = None
        for name in self._reward_names(task):
            if self._pool is not None and name in self._user_rewards:
                by_name[name] = await self._pool.reward(
                    name, messages, metadata=task.metadata, variables=task.variables
                )
            elif name == _EXPECTED_ANSWER:
                key = self._answer_key(task)
                by_name[name] = float(key is not None and is_accepted(last_answer(messages), key))
            elif self._judge is not None and not self._fails_precondition(by_name):
                answer, turns = last_answer(messages), messages[len(task.messages) :]
                verdict = await self._judge.judge(task, answer, turns, seed=seed, recorder=recorder)
                by_name[name] = verdict.score
        if not by_name:
            return Judgement(None, {})
        total = 0.0 if self._fails_precondition(by_name) else sum(by_name.values())
        preconditions = tuple(self._preconditions(by_name))
        if verdict is None:
            return Judgement(total, by_name, preconditions=preconditions)
        return Judgement(total, by_name, verdict.paid, verdict.reasoning, preconditions)

    def _fails_precondition(self, by_name: Mapping[str, float]) -> bool:
        return any(by_name[name] == 0 for name in self._preconditions(by_name))

    def _preconditions(self, names: Iterable[str]) -> list[str]:
        rewards = self._user_rewards
        return [name for name in names if name in rewards and rewards[name].precondition]

    def _answer_key(self, task: Task) -> AnswerKey | None:
        try:
            return answer_key(task.metadata, default=self._match)
        except DataError as error:
            raise DataError(f"task {task.task_id}: {error.problem}", error.fix) from error

    def _reward_names(self, task: Task) -> list[str]:
        """Returns the names of a task's rewards, the judge last, since its calls cost money."""
        wanted = task.reward_names
        names = [n for n in self._user_rewards if wanted is None or n in wanted]
        fallbacks: list[str] = []
        if task.metadata.get(_EXPECTED_ANSWER) is not None:
            fallbacks.append(_EXPECTED_ANSWER)
        if self._judge is not None:
            fallbacks.append(JUDGE)
        named = [n for n in fallbacks if n in (wanted or ()) and n not in names]
        if names or named:
            return names + named
        # If there is no judge, a row that names it must not get a reward for matching words.
        return [] if JUDGE in (wanted or ()) else fallbacks[-1:]


def gives_expected_answer(
    messages: Sequence[Message], metadata: Mapping[str, Any], *, and_nothing_else: bool = False
) -> bool | None:
    """Returns whether the last answer matches the metadata's expected_answer; None without one."""
    try:
        key = answer_key(metadata)
    except DataError:
        return None
    if key is None:
        return None
    return (is_only_answer if and_nothing_else else is_accepted)(last_answer(messages), key)


def last_answer(messages: Sequence[Message]) -> str:
    """Returns the last assistant message's text without its thinking; "" if it calls tools.

    A tool call that the model's server left in the text is not an answer either.
    """
    last = next((m for m in reversed(messages) if m["role"] == "assistant"), None)
    if last is None or last.get("tool_calls"):
        return ""
    answer = strip_thinking(_text_of(last))
    return "" if has_call_text(answer) else answer


def _text_of(message: Message) -> str:
    """Returns the text of a message, without its images and audio."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") for part in content if part.get("type") in _TEXT_PARTS]
    return "".join(text for text in texts if isinstance(text, str))

"""The format of evaluation.json, which an evaluation writes to its run folder."""

from collections.abc import Iterator

import msgspec

from stillroom.errors import noun_for
from stillroom.evaluate.intervals import Estimate
from stillroom.types import OthersText, dollars

RESULT_FILE = "evaluation.json"


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """The mean success and reward of one task over its samples."""

    task_id: str
    success: float
    """The share of successful samples, from 0 to 1."""
    reward: float
    """The mean reward; a sample without a reward counts as 0."""
    groups: dict[str, str]
    """The task's group by metadata field; `(none)` for a field that it does not have."""


class GuardScore(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one prompt of the guard set."""

    task_id: str
    success: bool | None
    """Whether the answer is the expected one; None if the row expects none."""
    calls_tool: bool
    """Whether a tool was called, although no prompt of a guard set needs one."""


class GuardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result on the guard set: prompts from outside the task, none of which needs a tool."""

    data: str
    accuracy: Estimate | None
    """The share of right answers among the rows with an expected one; None without such rows."""
    over_calling: Estimate
    """The share of the prompts for which a tool is called, though none needs one."""


class TaskCost(msgspec.Struct, frozen=True, kw_only=True):
    """The average cost of one task: dollars, seconds and tokens, of finished rollouts only."""

    usd: float | None
    """The price of the model's calls, or of the machine's time if the model runs on it, in dollars;
    None if it is unknown."""
    seconds: float
    """The seconds from a prompt to the end of its rollout, while others run concurrently."""
    machine_seconds: float
    """The seconds of the whole evaluation per task; concurrent tasks make it shorter."""
    tokens: float
    """The prompt and completion tokens of all calls."""
    is_local: bool
    """Whether the model runs on this machine; it then costs machine time, and no call is billed."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation."""

    name: str
    model: str
    data: str
    accuracy: Estimate
    by_group: dict[str, dict[str, Estimate]]
    """The accuracy of each group, by metadata field and then by that field's value."""
    mean_reward: float
    mean_turns: float
    tool_errors: int
    truncated: int
    cut_by: dict[str, int] = {}
    """The number of cut answers (`truncated`) by what cut them: max_tokens, context_window or
    content_filter. Empty in evaluations of earlier versions."""
    failed: int
    """The number of rollouts that failed because of infrastructure; they are neither right nor
    wrong."""
    teacher: str | None
    teacher_kl: Estimate | None
    """The reverse KL per token in nats, KL(model || teacher), on the model's own samples at
    temperature 1; None without a teacher."""
    sampled_accuracy: Estimate | None = None
    """The accuracy of the samples at temperature 1; None without such samples."""
    temperature: float | None = None
    """The temperature of all other answers; None in evaluations of earlier versions."""
    rollouts: str
    """The path of the file with the evaluation's rollouts."""
    seconds: float
    """The seconds of the work; on another machine without installation and transfers."""
    instruction: OthersText | None = None
    """The system message and context before each prompt, shortened; None: the prompts alone."""
    cost_usd: float | None = None
    """The cost of this run's calls in dollars, those of a judge and of failed rollouts too, without
    the machine's time (`machine_time_usd`); None if a price is unknown."""
    machine_time_usd: float | None = None
    """The price of `seconds` on the machine that ran the model, or on the remote machine of the
    run, without starting either; None without a price, or if an API ran the model."""
    per_task: TaskCost | None = None
    """The average cost of a task; None in evaluations of earlier versions."""
    guard: GuardResult | None = None
    """The result on the guard set; None without one."""
    commonest_answer: Estimate | None = None
    """The accuracy of always giving the commonest expected answer; None unless answers repeat."""
    reused: int = 0
    """The number of answers from an evaluation with the same settings that did not finish."""
    unjudged: int = 0
    """The number of tasks that were left out, because nothing could judge their answers."""
    contained: int = 0
    """The number of tasks that count as right if the answer contains the expected one."""
    exact_accuracy: Estimate | None = None
    """The accuracy if such an answer must be the expected one and nothing else; None unless tasks
    are `contained`, and in evaluations of earlier versions."""
    omitted: int = 0
    """The number of rollouts that were not run, because the budget was spent."""
    stopped_by: str | None = None
    """The limit that ended the evaluation early; None if it ran to its end."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of evaluation.json: the result, and each task's score for paired comparisons."""

    result: EvaluationResult
    tasks: list[TaskScore]
    sampled: list[TaskScore] = []
    """The scores of the answers at temperature 1, if there are any."""
    guard: list[GuardScore] = []


def other_measures(result: EvaluationResult) -> Iterator[str]:
    """Yields phrases on the other results: temperature 1, guard set, costs and omissions."""
    if result.sampled_accuracy is not None:
        yield f"at temperature 1: {_percent(result.sampled_accuracy)}"
    if (guard := result.guard) is not None:
        right = "" if guard.accuracy is None else f"{_percent(guard.accuracy)} right, "
        yield f"guard set: {right}needless tool calls at {_percent(guard.over_calling)}"
    if (cost := result.per_task) is not None:
        usd = "at an unknown price" if cost.usd is None else dollars(cost.usd)
        yield f"a task: {task_time(cost)}, {usd}, {cost.tokens:.0f} tokens"
    if (commonest := result.commonest_answer) is not None:
        yield f"always giving the commonest answer: {_percent(commonest)}"
    if result.reused:
        yield f"answers from an unfinished evaluation: {result.reused}"
    if result.unjudged:
        tasks = f"{result.unjudged} {noun_for(result.unjudged, 'task')}"
        yield f"left out: {tasks} without reward function, judge or expected answer"
    if result.contained:
        tasks = f"{result.contained} {noun_for(result.contained, 'task')}"
        yield f"an answer counts as right if it contains the expected one: {tasks}"
    if result.exact_accuracy is not None:
        yield f"accuracy if it must say nothing else: {_percent(result.exact_accuracy)}"
    if result.stopped_by is not None:
        yield f"ended early by {result.stopped_by}: {result.omitted} rollouts were not run"


def task_time(cost: TaskCost) -> str:
    """Returns a task's share of the wall time and its own time from prompt to answer, as text."""
    return f"{cost.machine_seconds:.2g} s ({cost.seconds:.2g} s from prompt to answer)"


def _percent(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.1%}"
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"

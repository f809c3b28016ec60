"""The format of evaluation.json, which an evaluation writes to its run folder."""

import msgspec

from stillroom.evaluate.intervals import Estimate
from stillroom.types import OthersText

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
    failed: int
    """The number of rollouts that infrastructure ended; they count neither as right nor wrong."""
    teacher: str | None
    teacher_kl: Estimate | None
    """The reverse KL per token in nats, KL(model || teacher), on the model's own samples at
    temperature 1; None without a teacher."""
    sampled_accuracy: Estimate | None = None
    """The accuracy of these samples, which tells what the model does at temperature 1."""
    rollouts: str
    """The path of the file with the evaluation's rollouts."""
    seconds: float
    instruction: OthersText | None = None
    """What the model read before each prompt, in a few words; None: nothing but the prompt."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of evaluation.json: the result, and each task's score for paired comparisons."""

    result: EvaluationResult
    tasks: list[TaskScore]

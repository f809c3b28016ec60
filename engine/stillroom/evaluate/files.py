"""The format of evaluation.json, which an evaluation writes to its run's folder."""

import msgspec

from stillroom.evaluate.intervals import Estimate

RESULT_FILE = "evaluation.json"


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """The means of one task over its samples."""

    task_id: str
    success: float
    reward: float
    groups: dict[str, str]


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation."""

    name: str
    model: str
    data: str
    accuracy: Estimate
    by_group: dict[str, dict[str, Estimate]]
    """The accuracy by metadata field, then by that field's value."""
    mean_reward: float
    mean_turns: float
    tool_errors: int
    truncated: int
    failed: int
    """The number of rollouts that infrastructure ended: neither right nor wrong."""
    teacher: str | None
    teacher_kl: Estimate | None
    """Reverse KL per token (nats), KL(model || teacher), on the model's own samples at T 1."""
    rollouts: str
    seconds: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of evaluation.json: the result, and each task's score for paired comparisons."""

    result: EvaluationResult
    tasks: list[TaskScore]

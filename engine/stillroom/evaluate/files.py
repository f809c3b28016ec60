"""What an evaluation leaves behind: evaluation.json in its run's folder."""

import msgspec

from stillroom.evaluate.intervals import Estimate

RESULT_FILE = "evaluation.json"


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """One task's outcome: means over its samples."""

    task_id: str
    success: float
    reward: float
    groups: dict[str, str]


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluation came to."""

    name: str
    model: str
    data: str
    accuracy: Estimate
    by_group: dict[str, dict[str, Estimate]]
    """Field of the metadata → its value → accuracy."""
    mean_reward: float
    mean_turns: float
    tool_errors: int
    truncated: int
    failed: int
    """Rollouts that infrastructure ended; they count neither as right nor as wrong."""
    teacher: str | None
    teacher_kl: Estimate | None
    """Reverse KL per token (nats), KL(model || teacher), on the model's own samples at T 1."""
    rollouts: str
    seconds: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """All of evaluation.json: the result and each task's score, for paired comparisons."""

    result: EvaluationResult
    tasks: list[TaskScore]

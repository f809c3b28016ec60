"""Results of evaluations."""

from typing import Any

from stillroom.evaluate.files import EvaluationResult
from stillroom.evaluate.intervals import Estimate


def evaluation_result(name: str, accuracy: Estimate, **fields: Any) -> EvaluationResult:
    """The result of an evaluation; `fields` are those that matter to a test."""
    plain: dict[str, Any] = {
        "model": name,
        "data": "heldout.jsonl",
        "by_group": {},
        "mean_reward": 0.0,
        "mean_turns": 1.0,
        "tool_errors": 0,
        "truncated": 0,
        "failed": 0,
        "teacher": None,
        "teacher_kl": None,
        "rollouts": "r.jsonl",
        "seconds": 1.0,
    }
    return EvaluationResult(name=name, accuracy=accuracy, **(plain | fields))

"""The next step speaks of what is odd in a result."""

from typing import Any

import pytest

from stillroom.types import RunKind
from stillroom_mcp.outcomes import first_remark, last_step

USAGE = {"prompt_tokens": 9, "completion_tokens": 5}
ROLLOUTS = {
    "output": "r.jsonl",
    "succeeded": 100,
    "rewarded": 100,
    "num_success": 80,
    "usage": USAGE,
}
ACCURACY = {"value": 0.7, "low": 0.6, "high": 0.8, "n": 100}


@pytest.mark.parametrize(
    ("kind", "outcome", "remark"),
    [
        (RunKind.ROLLOUTS, ROLLOUTS, ""),
        (RunKind.ROLLOUTS, {**ROLLOUTS, "succeeded": 0}, ""),
        (RunKind.ROLLOUTS, {**ROLLOUTS, "rewarded": 0, "num_success": 0}, "score_rollouts with"),
        (RunKind.ROLLOUTS, {**ROLLOUTS, "num_success": 0}, "inspect_examples(path=r.jsonl)"),
        (RunKind.ROLLOUTS, {**ROLLOUTS, "truncated": 30}, "30 of 100 rollouts were truncated"),
        (RunKind.ROLLOUTS, {**ROLLOUTS, "truncated": 2}, ""),
        (RunKind.SCORE, {"num_success": 0}, "no row succeeds with the new rewards"),
        (RunKind.SCORE, {"num_success": 3}, ""),
        (
            RunKind.EVALUATE,
            {"accuracy": ACCURACY, "teacher": "t", "teacher_kl": None},
            "the KL to the teacher was not measured",
        ),
        (RunKind.EVALUATE, {"accuracy": ACCURACY}, ""),
        (
            RunKind.SFT,
            {"stopped_by": "trainer.max_minutes", "steps": 3, "planned_steps": 10, "rows": 9},
            "stopped at its time limit after step 3 of 10",
        ),
        (
            RunKind.EVALUATE,
            {"accuracy": ACCURACY, "stopped_by": "budget_usd", "omitted": 40},
            "budget_usd was reached and 40 rollouts are missing",
        ),
        (RunKind.EVALUATE, {"accuracy": ACCURACY, "failed": 20}, "20 rollouts failed"),
        (
            RunKind.EVALUATE,
            {"accuracy": ACCURACY, "truncated": 9, "cut_by": {"max_tokens": 9}},
            "higher max_tokens",
        ),
        (
            RunKind.EVALUATE,
            {"accuracy": ACCURACY, "truncated": 9, "cut_by": {"context_window": 9}},
            "filled the model's context",
        ),
        (RunKind.EVALUATE, {"accuracy": {**ACCURACY, "value": 0.0}}, "no task was solved"),
        (
            RunKind.EVALUATE,
            {"accuracy": ACCURACY, "sampled_accuracy": {"value": 0.1, "high": 0.2}},
            "70% of the tasks at temperature 0, but 10% at temperature 1: serve it at temperature",
        ),
        (
            RunKind.EVALUATE,
            {
                "accuracy": ACCURACY,
                "sampled_accuracy": {"value": 0.1, "high": 0.2},
                "temperature": 0.3,
            },
            "but 10% at temperature 1: serve it at temperature 0.3, or continue training",
        ),
        (
            RunKind.EVALUATE,
            {"accuracy": ACCURACY, "exact_accuracy": {"value": 0.1}},
            "70% of the answers are right, but only 10% say nothing else",
        ),
        (RunKind.SFT, {"steps": 3}, ""),
        (RunKind.SFT, {"rows": 99, "skipped": {"longer than max_length": 3}}, ""),
        (
            RunKind.DPO,
            {"rows": 80, "skipped": {"longer than max_length": 15, "no tokens": 5}},
            "20 of 100 rows were left out of the training",
        ),
    ],
)
def test_what_is_odd_is_said_first(kind: RunKind, outcome: dict[str, Any], remark: str) -> None:
    said = first_remark(kind, outcome)
    assert remark in said
    assert bool(said) == bool(remark)
    assert said.endswith("; then ") == bool(remark)


@pytest.mark.parametrize(
    ("system", "said", "option"),
    [("Sort it.", True, False), ("", False, True), (None, False, False)],
)
def test_the_user_is_told_of_the_system_message_that_a_student_needs(system, said, option):
    step = last_step(RunKind.RECIPE, {"system": system, "training_run": "sft-1"})

    assert step is not None
    assert ("needs the message in `system`" in step) == said
    assert ('system="", ' in step) == option

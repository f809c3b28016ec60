"""What in a run's result deserves a look before the next stage, and what to do about it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stillroom.types import RunKind

_MANY = 0.05
"""The share of rows from which on a fault is not an accident."""


def first_remark(kind: RunKind, outcome: Mapping[str, Any]) -> str:
    """Returns what to look at first, ending with "; then "; "" if nothing in the result is odd."""
    remarks = _REMARKS.get(kind)
    remark = next(remarks(outcome), None) if remarks is not None else None
    return f"{remark}; then " if remark is not None else ""


def _of_rollouts(outcome: Mapping[str, Any]) -> Iterator[str]:
    succeeded, output = outcome.get("succeeded") or 0, outcome.get("output")
    if not succeeded:
        return
    if outcome.get("already_done") == succeeded:
        yield (
            f"nothing was called, as {output} has all {succeeded} rollouts already: more "
            "samples_per_prompt, other prompts or another output make new ones"
        )
    elif not outcome["usage"]["completion_tokens"]:
        yield f"the model wrote nothing: read some rollouts (inspect_examples(path={output}))"
    if outcome.get("taken_over") == 0:
        yield (
            "the teacher took over in no rollout: it acts as the student does, or the critic finds "
            "no turn wrong; take another teacher or critic"
        )
    if not outcome.get("rewarded"):
        yield (
            "nothing judged these rollouts (reward: null): score_rollouts with rewards.py, a judge "
            "or metadata.expected_answer"
        )
    elif not outcome.get("num_success"):
        yield (
            f"none of the {succeeded} rollouts succeeded: read some (inspect_examples(path="
            f"{output})), it may be the rewards that are wrong"
        )
    if (truncated := outcome.get("truncated") or 0) > _MANY * succeeded:
        yield (
            f"{truncated} of {succeeded} rollouts were cut: a higher max_tokens with another "
            "output (unless they fill the model's context), or they teach the student to ramble"
        )


def _of_scores(outcome: Mapping[str, Any]) -> Iterator[str]:
    if failed := outcome.get("failed"):
        yield (
            f"{failed} rewards could not be computed and are null ({outcome['problems'][0]}): the "
            "same call again pays for those rows alone"
        )
    if outcome.get("num_success") == 0:
        yield "no row succeeds by the new rewards: check them on a few rows (inspect_examples)"


_CUT_ANSWERS = {
    "max_tokens": "were cut at max_tokens: evaluate again with a higher max_tokens",
    "context_window": (
        "filled the context that the model has, not max_tokens: shorten the prompts, or serve the "
        "model with a longer context (vLLM: --max-model-len) and raise max_context_window"
    ),
    "content_filter": "were withheld by the endpoint's filter, which no option here changes",
}


def _of_evaluation(outcome: Mapping[str, Any]) -> Iterator[str]:
    accuracy: Mapping[str, Any] = outcome["accuracy"]
    num = accuracy.get("n") or 0
    if limit := outcome.get("stopped_by"):
        yield (
            f"{limit} was reached, {outcome.get('omitted')} rollouts were not done: evaluate again "
            "with more, or compare on the tasks that were"
        )
    if outcome.get("teacher") and outcome.get("teacher_kl") is None:
        yield "the KL to the teacher was not measured: get_run_logs says why"
    if unjudged := outcome.get("unjudged"):
        yield (
            f"{unjudged} tasks were left out, as they have no expected_answer and no reward: say "
            "so with the accuracy, or evaluate again with rewards or a judge"
        )
    if (failed := outcome.get("failed") or 0) > _MANY * num > 0:
        yield f"{failed} rollouts failed by infrastructure and are left out: evaluate again"
    for reason, advice in _CUT_ANSWERS.items():
        if (cut := (outcome.get("cut_by") or {}).get(reason, 0)) > _MANY * num > 0:
            yield f"{cut} of the answers {advice}"
    if accuracy.get("value") == 0 and num:
        yield (
            f"no task was solved: read some (inspect_examples(path={outcome.get('rollouts')})); "
            "tools, rewards or system message may differ from those of training"
        )
    sampled = outcome.get("sampled_accuracy")
    if sampled and sampled["high"] is not None and sampled["high"] < (accuracy["low"] or 0.0):
        yield (
            f"tell the user that at temperature 1 it solves {sampled['value']:.0%} of the tasks, "
            f"and {accuracy['value']:.0%} at temperature {outcome.get('temperature') or 0:g}: "
            "serve it at that temperature, or train on"
        )


def _of_training(outcome: Mapping[str, Any]) -> Iterator[str]:
    left_out, rows = sum((outcome.get("skipped") or {}).values()), outcome.get("rows") or 0
    if left_out > _MANY * (left_out + rows):
        yield (
            f"tell the user that {left_out} of {left_out + rows} rows were left out of the "
            "training (skipped says why)"
        )


_REMARKS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    RunKind.ROLLOUTS: _of_rollouts,
    RunKind.SCORE: _of_scores,
    RunKind.EVALUATE: _of_evaluation,
    RunKind.SFT: _of_training,
    RunKind.DPO: _of_training,
    RunKind.DISTILL: _of_training,
}

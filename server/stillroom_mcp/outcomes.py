"""Remarks on results of runs that need attention before the next stage."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stillroom.errors import noun_for
from stillroom.types import RunKind

_NOTABLE_SHARE = 0.05
"""The share of rows above which a problem is worth a remark."""


def first_remark(kind: RunKind, outcome: Mapping[str, Any]) -> str:
    """Returns the first remark, ending with "; then ", or "" if the result needs none."""
    remarks = _REMARKS.get(kind)
    remark = next(remarks(outcome), None) if remarks is not None else None
    return f"{remark}; then " if remark is not None else ""


def last_step(kind: RunKind, outcome: Mapping[str, Any]) -> str | None:
    """Returns what follows a run that ends a distillation; None for other runs."""
    if kind is RunKind.RECIPE:
        system = 'system="", ' if outcome.get("system") == "" else ""
        needs_system = bool(outcome.get("system"))
        needed = "that the student needs the message in `system`, " if needs_system else ""
        answers: Mapping[str, Any] = outcome.get("answers") or {}
        measured = outcome.get("accuracy") or [{}]
        by_answer = (
            f"get_run({measured[-1].get('run_id')}) has accuracy by answer (by_group); "
            if answers.get("are_labels")
            else ""
        )
        return (
            f"tell the user {needed}accuracy, gain (over gain_over), above_teacher and "
            "caveats, and ask them to open the report; "
            f"{by_answer}evaluate_model(model={outcome.get('training_run')}, provider=hf, {system}"
            "data=<other prompts>) and all other operations work with its runs"
        )
    if kind is RunKind.EXPORT:
        serve = "; serve it with the command in `serve`" if outcome.get("serve") else ""
        check = (
            ""
            if outcome.get("verified")
            else "the files are not tested (export again with verify=50 to test them); "
        )
        return f"{check}tell the user about the warnings, and read {outcome['card']}{serve}"
    return None


def _rollout_remarks(outcome: Mapping[str, Any]) -> Iterator[str]:
    """Yields remarks on the result of a rollout run, the most important first."""
    succeeded, output = outcome.get("succeeded") or 0, outcome.get("output")
    if not succeeded:
        return
    if outcome.get("already_done") == succeeded:
        yield (
            f"no call was made, since {output} already has all {succeeded} rollouts: for new ones, "
            "raise samples_per_prompt, or use other prompts or another output"
        )
    elif not outcome["usage"]["completion_tokens"]:
        yield f"the model generated no tokens: read some rollouts (inspect_examples(path={output}))"
    if outcome.get("taken_over") == 0:
        yield (
            "the teacher took over in no rollout: it acts like the student, or the critic found no "
            "wrong turn; use another teacher or critic"
        )
    if not outcome.get("rewarded"):
        yield (
            "these rollouts have no rewards (reward: null): call score_rollouts with rewards.py, a "
            "judge or metadata.expected_answer"
        )
    elif not outcome.get("num_success"):
        yield (
            f"none of the {succeeded} rollouts succeeded: read some (inspect_examples(path="
            f"{output})); the rewards may be wrong"
        )
    if (truncated := outcome.get("truncated") or 0) > _NOTABLE_SHARE * succeeded:
        yield (
            f"{truncated} of {succeeded} rollouts were truncated, and would teach the student to "
            "ramble: raise max_tokens and use another output (unless they fill the model's context)"
        )


def _score_remarks(outcome: Mapping[str, Any]) -> Iterator[str]:
    if failed := outcome.get("failed"):
        yield (
            f"{failed} rewards could not be computed and are null ({outcome['problems'][0]}): "
            "repeat the call, which pays only for those rows"
        )
    if outcome.get("num_success") == 0:
        yield "no row succeeds with the new rewards: check them on a few rows (inspect_examples)"


_TRUNCATED_ANSWERS = {
    "max_tokens": "were truncated at max_tokens: evaluate again with a higher max_tokens",
    "context_window": (
        "filled the model's context before max_tokens was reached: shorten the prompts, or serve "
        "the model with a longer context (vLLM: --max-model-len) and raise max_context_window"
    ),
    "content_filter": "were blocked by the endpoint's content filter, which no option changes",
}


def _evaluation_remarks(outcome: Mapping[str, Any]) -> Iterator[str]:
    accuracy: Mapping[str, Any] = outcome["accuracy"]
    num = accuracy.get("n") or 0
    if limit := outcome.get("stopped_by"):
        yield (
            f"{limit} was reached and {outcome.get('omitted')} rollouts are missing: evaluate "
            "again with a higher limit, or compare on the finished tasks"
        )
    if outcome.get("teacher") and outcome.get("teacher_kl") is None:
        yield "the KL to the teacher was not measured: get_run_logs shows the reason"
    if unjudged := outcome.get("unjudged"):
        yield (
            f"the accuracy leaves out {unjudged} {noun_for(unjudged, 'task')} without an "
            "expected_answer or reward: tell the user, or evaluate again with rewards or a judge"
        )
    if (failed := outcome.get("failed") or 0) > _NOTABLE_SHARE * num > 0:
        yield f"{failed} rollouts failed because of infrastructure and are left out: evaluate again"
    for reason, advice in _TRUNCATED_ANSWERS.items():
        if (cut := (outcome.get("cut_by") or {}).get(reason, 0)) > _NOTABLE_SHARE * num > 0:
            yield f"{cut} answers {advice}"
    if accuracy.get("value") == 0 and num:
        yield (
            "no task was solved: read some rollouts "
            f"(inspect_examples(path={outcome.get('rollouts')})); "
            "the tools, rewards or system message may differ from those of training"
        )
    sampled = outcome.get("sampled_accuracy")
    if sampled and sampled["high"] is not None and sampled["high"] < (accuracy["low"] or 0.0):
        temperature = f"temperature {outcome.get('temperature') or 0:g}"
        yield (
            f"tell the user that the model solves {accuracy['value']:.0%} of the tasks at "
            f"{temperature}, but {sampled['value']:.0%} at temperature 1: serve it at "
            f"{temperature}, or continue training"
        )
    exact = outcome.get("exact_accuracy")
    if exact and accuracy["value"] - exact["value"] > _NOTABLE_SHARE:
        yield (
            f"tell the user that {accuracy['value']:.0%} of the answers are right, but only "
            f"{exact['value']:.0%} say nothing else"
        )


def _training_remarks(outcome: Mapping[str, Any]) -> Iterator[str]:
    if outcome.get("stopped_by"):
        steps, planned = outcome.get("steps"), outcome.get("planned_steps")
        yield (
            "tell the user that training stopped at its time limit after step "
            f"{steps} of {planned}; start_training(resume=<its run id>, "
            "overrides=[trainer.max_minutes=…]) continues it"
        )
    left_out, rows = sum((outcome.get("skipped") or {}).values()), outcome.get("rows") or 0
    if left_out > _NOTABLE_SHARE * (left_out + rows):
        yield (
            f"tell the user that {left_out} of {left_out + rows} rows were left out of the "
            "training (skipped says why)"
        )


_REMARKS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    RunKind.ROLLOUTS: _rollout_remarks,
    RunKind.SCORE: _score_remarks,
    RunKind.EVALUATE: _evaluation_remarks,
    RunKind.SFT: _training_remarks,
    RunKind.DPO: _training_remarks,
    RunKind.DISTILL: _training_remarks,
}

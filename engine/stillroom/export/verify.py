"""Evaluates the written files of an export, and compares them with the checkpoint."""

import functools
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgspec
import torch

from stillroom.errors import RunError
from stillroom.evaluate.answers import EvaluationPart
from stillroom.evaluate.compare import shared_scores
from stillroom.evaluate.files import TaskScore
from stillroom.evaluate.intervals import excludes_zero, mean_estimate
from stillroom.evaluate.scores import score_tasks
from stillroom.export.programs import running_server
from stillroom.export.serving import ServingFacts, VerifiedAccuracy, serve_command
from stillroom.export.verify_plan import Verification
from stillroom.lines import read_lines
from stillroom.reporting import Reporter
from stillroom.rollout.episode.collect import specs_for
from stillroom.settings import Workspace
from stillroom.types import Message, Trajectory

_MIN_TASKS = 2
_LLAMA_CONTEXT = 16384
_MIN_TIMEOUT_S = 600.0
"""The minimum request timeout, since an answer may take minutes without a GPU."""
_REMEDIES = {
    "transformers": "export with precision fp32, or format adapter; if that also fails, the tools, "
    "rewards or settings have changed since the evaluation: repeat the evaluation",
    "vLLM": "serve with the number format and the chat template of the folder, and check that the "
    "tool-call parser fits the model; or export without verify and serve with transformers",
    "llama.cpp": "convert with precision fp32 and a newer llama.cpp; check that it supports the "
    "tokenizer and the chat template (--jinja); or serve format merged with vLLM",
}
"""What to do if files are less accurate than the checkpoint, by the program that loaded them."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files of an export in their temporary folder."""

    folder: Path
    gguf_file: str | None
    served: ServingFacts
    """The facts for serving the files, with local paths of the folder and the base."""
    log_folder: Path
    """The folder of the run, for the logs of servers."""
    max_context: int | None
    """The maximum number of tokens that the model has positions for."""


def verify_files(
    workspace: Workspace, verification: Verification, files: WrittenFiles, reporter: Reporter
) -> list[VerifiedAccuracy]:
    """Evaluates the written files with each program that can load them, and returns the results.

    llama.cpp loads a GGUF file; transformers loads other files, and vLLM too if it is installed
    and has a GPU. Raises RunError if the files cannot be loaded, or solve clearly fewer tasks than
    the checkpoint.
    """
    name, log = files.served.name, files.log_folder / "verify_server.txt"
    check = functools.partial(_evaluate_files, workspace, verification, reporter)
    if files.gguf_file is not None:
        gguf = str(files.folder / files.gguf_file)
        context = min(files.max_context or _LLAMA_CONTEXT, _LLAMA_CONTEXT)
        command = [*verification.llama_server, "-m", gguf, "--jinja", "-c", str(context)]
        # One prompt at a time, since batching changes the last digits of the logits.
        with running_server([*command, "-np", "1"], log=log, reporter=reporter) as address:
            return [check("llama.cpp", name, address, concurrency=1)]
    verified = [check("transformers", str(files.folder), None)]
    command = shlex.split(serve_command(files.served) or "")
    if command and shutil.which(command[0]) is not None and torch.cuda.is_available():
        with running_server(command, log=log, reporter=reporter) as address:
            verified.append(check("vLLM", name, address))
    return verified


def _evaluate_files(
    workspace: Workspace,
    verification: Verification,
    reporter: Reporter,
    program: str,
    model: str,
    address: str | None,
    **options: int,
) -> VerifiedAccuracy:
    """Evaluates the written files: on a server at `address`, else in this process."""
    provider = "hf" if address is None else "openai"
    timeout_s = max(verification.request.request_timeout, _MIN_TIMEOUT_S)
    plan = verification.plan_for_files(
        workspace,
        model=model,
        provider=provider,
        base_url=address,
        request_timeout=timeout_s,
        **options,
    )
    specs = specs_for(plan.rollouts.load_tasks(), 1)
    temperature = verification.request.temperature
    part = EvaluationPart(plan.rollouts, specs, temperature, f"verify with {program}", None)
    with TemporaryDirectory() as temporary:
        answers = anyio.run(part.run, reporter, Path(temporary) / "rollouts.jsonl")
    pairs = shared_scores(verification.evaluation.tasks, score_tasks(answers.rollouts, ()))
    if len(pairs) < max(_MIN_TASKS, len(specs) / 2):
        raise RunError(
            f"with {program}, the written files answered only {len(pairs)} of {len(specs)} "
            "prompts, so they were deleted",
            f"read the run's log for the failures; if the prompts of run {verification.run_id} "
            "have changed, evaluate the checkpoint again",
        )
    same_share = same_answers(verification, answers.rollouts) if temperature == 0 else None
    return _compare_with_checkpoint(program, pairs, verification, same_share)


class _ComparedRollout(msgspec.Struct):
    """The fields of an evaluation's rollout that are compared."""

    task_id: str
    messages: list[Message]


def same_answers(verification: Verification, rollouts: Sequence[Trajectory]) -> float | None:
    """Returns the share of rollouts whose answers equal the checkpoint's word for word.

    Returns None if the rollouts of the checkpoint's evaluation no longer exist.
    """
    name = Path(verification.evaluation.result.rollouts).name
    path = verification.run_folder / name
    expected: dict[str, list[Any]] = {}
    try:
        for line in read_lines(path):
            with suppress(msgspec.DecodeError, RecursionError):
                row = msgspec.json.decode(line.data, type=_ComparedRollout)
                expected.setdefault(row.task_id, _turn_contents(row.messages))
    except OSError:
        return None
    shared = [rollout for rollout in rollouts if rollout.task_id in expected]
    if not shared:
        return None
    return fmean(
        _turn_contents(rollout.messages) == expected[rollout.task_id] for rollout in shared
    )


def _turn_contents(messages: Sequence[Message]) -> list[Any]:
    """Returns the text, without surrounding spaces, and the calls, without ids, of each turn."""
    contents: list[Any] = []
    for message in messages:
        if message["role"] == "assistant":
            content = message.get("content") or ""
            text = content.strip() if isinstance(content, str) else content
            contents.append((text, [call["function"] for call in message.get("tool_calls") or []]))
    return contents


def _compare_with_checkpoint(
    program: str,
    pairs: Sequence[tuple[TaskScore, TaskScore]],
    verification: Verification,
    same_share: float | None,
) -> VerifiedAccuracy:
    """Returns the accuracy of the written files next to the checkpoint's.

    pairs: each task's score with the checkpoint and with the files. same_share: the share of
    answers that are the same.
    Raises RunError if the files are clearly less accurate.
    """
    difference = mean_estimate([new.success - old.success for old, new in pairs], limits=(-1, 1))
    verified = VerifiedAccuracy(
        served_by=program,
        tasks=len(pairs),
        accuracy=fmean(new.success for _, new in pairs),
        checkpoint_accuracy=fmean(old.success for old, _ in pairs),
        difference=difference,
        same_answers=same_share,
        evaluation=verification.run_id,
    )
    is_worse = difference.value < 0 and (excludes_zero(difference) or verified.accuracy == 0)
    # If neither solves a task, only equal answers show that the files work.
    if is_worse or (verified.accuracy == 0 and same_share == 0):
        raise RunError(
            f"with {program}, the written files solve {verified.accuracy:.0%} of {len(pairs)} "
            f"tasks and the checkpoint {verified.checkpoint_accuracy:.0%}, so the files were "
            "deleted",
            _REMEDIES[program],
        )
    return verified

"""Evaluates the written files of an export, and compares them with the checkpoint."""

import functools
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import anyio
import torch

from stillroom.errors import RunError
from stillroom.evaluate.answers import Answering
from stillroom.evaluate.compare import shared_scores
from stillroom.evaluate.files import TaskScore
from stillroom.evaluate.intervals import excludes_zero, mean_estimate
from stillroom.evaluate.scores import score_tasks
from stillroom.export.programs import running_server
from stillroom.export.serving import Served, Verified, serve_command
from stillroom.export.verify_plan import Verification
from stillroom.reporting import Reporter
from stillroom.rollout.episode.collect import specs_for
from stillroom.settings import Workspace

_LEAST_TASKS = 2
_REMEDIES = {
    "transformers": "export with precision fp32, or format adapter; if that also fails, the tools, "
    "rewards or settings have changed since the evaluation: repeat the evaluation",
    "vLLM": "serve with the number format and the chat template of the folder, and check that the "
    "tool-call parser fits the model; or export without verify and serve with transformers",
    "llama.cpp": "convert with precision fp32 and a newer llama.cpp; check that it supports the "
    "tokenizer and the chat template (--jinja); or serve format merged with vLLM",
}
"""The remedies if files are less accurate than the checkpoint, by the program that loaded them."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files of an export in their temporary folder."""

    folder: Path
    gguf_file: str | None
    served: Served
    """The facts for serving the files, with local paths of the folder and the base."""
    log_folder: Path
    """The folder of the run, for the logs of servers."""


def verify_files(
    workspace: Workspace, verification: Verification, files: WrittenFiles, reporter: Reporter
) -> list[Verified]:
    """Evaluates the written files with each program that can load them, and returns the results.

    llama.cpp loads a GGUF file; transformers loads other files, and vLLM too if it is installed
    and has a GPU. Raises RunError if the files cannot be loaded, or solve clearly fewer tasks than
    the checkpoint.
    """
    name, log = files.served.name, files.log_folder / "verify_server.txt"
    check = functools.partial(_evaluate_files, workspace, verification, reporter)
    if files.gguf_file is not None:
        gguf = str(files.folder / files.gguf_file)
        command = [str(verification.llama_server), "-m", gguf, "--jinja"]
        with running_server(command, log=log, reporter=reporter) as address:
            return [check("llama.cpp", name, address)]
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
) -> Verified:
    """Evaluates the files that a server at `address` loaded; in this process without an address."""
    provider = "hf" if address is None else "openai"
    plan = verification.of_files(workspace, model=model, provider=provider, base_url=address)
    specs = specs_for(plan.rollouts.load_tasks(), 1)
    temperature = verification.request.temperature
    answering = Answering(plan.rollouts, specs, temperature, f"verify with {program}", None)
    answers = anyio.run(answering.run, reporter)
    pairs = shared_scores(verification.evaluation.tasks, score_tasks(answers.rollouts, ()))
    if len(pairs) < max(_LEAST_TASKS, len(specs) / 2):
        raise RunError(
            f"with {program}, the written files answered only {len(pairs)} of {len(specs)} "
            "prompts, so they were deleted",
            f"read the run's log for the failures; if the prompts of run {verification.run_id} "
            "have changed, evaluate the checkpoint again",
        )
    return _compare_with_checkpoint(program, pairs, verification)


def _compare_with_checkpoint(
    program: str, pairs: Sequence[tuple[TaskScore, TaskScore]], verification: Verification
) -> Verified:
    difference = mean_estimate([new.success - old.success for old, new in pairs], limits=(-1, 1))
    verified = Verified(
        served_by=program,
        tasks=len(pairs),
        accuracy=fmean(new.success for _, new in pairs),
        checkpoint_accuracy=fmean(old.success for old, _ in pairs),
        difference=difference,
        evaluation=verification.run_id,
    )
    if difference.value < 0 and (excludes_zero(difference) or verified.accuracy == 0):
        raise RunError(
            f"with {program}, the written files solve {verified.accuracy:.0%} of {len(pairs)} "
            f"tasks and the checkpoint {verified.checkpoint_accuracy:.0%}, so the files were "
            "deleted",
            _REMEDIES[program],
        )
    return verified

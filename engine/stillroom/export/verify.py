"""Evaluates the files of an export as they are served, and compares them with the checkpoint."""

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
from stillroom.export.serving import Served, serve_command
from stillroom.export.verify_plan import Verification
from stillroom.export.written import Verified
from stillroom.reporting import Reporter
from stillroom.rollout.episode.collect import specs_for
from stillroom.settings import Workspace

_LEAST_TASKS = 2
_REMEDIES = {
    "transformers": "export with precision fp32, or format adapter; if that fails too, the "
    "evaluation was made with other tools, rewards or settings than the project has now: repeat it",
    "vLLM": "serve with the number format and the chat template of the folder, and look whether "
    "the tool-call parser is the model's; or export without verify and serve with transformers",
    "llama.cpp": "convert with precision fp32, and with a newer llama.cpp; look whether it knows "
    "the tokenizer and the chat template (--jinja); or serve format merged with vLLM",
}
"""What to do about files that answer worse than their checkpoint, by who loaded them."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files of an export in their folder, which has not yet its final name."""

    folder: Path
    gguf_file: str | None
    served: Served
    """The facts for serving them, with the folder and the base as they are on this machine."""
    log_folder: Path
    """The folder of the run, where servers' output goes."""


def verify_files(
    workspace: Workspace, verification: Verification, files: WrittenFiles, reporter: Reporter
) -> list[Verified]:
    """Lets every installed program answer with the written files; returns what they did.

    A GGUF file is loaded by llama.cpp, all others by transformers, and by vLLM where it is
    installed and has a GPU. Raises RunError if the files are not loaded, or solve clearly fewer
    tasks than the checkpoint did.
    """
    name, log = files.served.name, files.log_folder / "verify_server.txt"
    check = functools.partial(_verified, workspace, verification, reporter)
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


def _verified(
    workspace: Workspace,
    verification: Verification,
    reporter: Reporter,
    program: str,
    model: str,
    address: str | None,
) -> Verified:
    """Evaluates the files behind an address, or in this process if there is none."""
    provider = "hf" if address is None else "openai"
    plan = verification.of_files(workspace, model=model, provider=provider, base_url=address)
    specs = specs_for(plan.rollouts.load_tasks(), 1)
    temperature = verification.request.temperature
    answering = Answering(plan.rollouts, specs, temperature, f"verify with {program}", None)
    answers = anyio.run(answering.run, reporter)
    pairs = shared_scores(verification.evaluation.tasks, score_tasks(answers.rollouts, ()))
    if len(pairs) < max(_LEAST_TASKS, len(specs) / 2):
        raise RunError(
            f"with {program} the written files answered {len(pairs)} of {len(specs)} prompts, so "
            "they were not kept",
            f"read the run's log for what failed (the others were no prompts of run "
            f"{verification.run_id}); evaluate the checkpoint again if its prompts have changed",
        )
    return _judged(program, pairs, verification)


def _judged(
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
            f"loaded by {program}, the written files solve {verified.accuracy:.0%} of "
            f"{len(pairs)} tasks, and the checkpoint {verified.checkpoint_accuracy:.0%}: they were "
            "not kept",
            _REMEDIES[program],
        )
    return verified

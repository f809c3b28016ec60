"""Turns the error that ended a run into the problem and the fix that its user reads.

For training, the fix names the checkpoint that the user can continue from. The functions only
read: they look for the run's checkpoints.
"""

import errno

from stillroom.errors import DivergedError, EngineError
from stillroom.models.resolve import CHECKPOINTS
from stillroom.run_folder import RunFailure, RunFolder
from stillroom.train.config.resume import latest_checkpoint
from stillroom.types import RunKind

_TRAINING = frozenset({RunKind.SFT, RunKind.DPO, RunKind.DISTILL})
# Parts of torch's messages when memory runs out: on CUDA, on the CPU, and in CUDA's libraries.
_NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")
_SMALLER = (
    "lower model.microbatch_tokens, model.max_length or concurrency, set "
    "model.gradient_checkpointing, or train an adapter (model.qlora_rank)"
)


def failure_of(error: BaseException, folder: RunFolder, kind: RunKind) -> RunFailure:
    """Returns why a run failed and what to do about it, given the error that ended it."""
    if isinstance(error, DivergedError):
        return RunFailure(problem=error.problem, fix=error.fix + _start_from(folder, kind))
    if isinstance(error, EngineError):
        return RunFailure(problem=error.problem, fix=error.fix + going_on(folder, kind))
    name, text = type(error).__name__, str(error).strip()
    if isinstance(error, MemoryError) or any(mark in text.lower() for mark in _NO_MEMORY):
        return RunFailure(
            problem=f"out of memory: {text[:300] or name}",
            fix=_SMALLER + _with_smaller_passes(folder, kind) + _start_from(folder, kind),
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return RunFailure(
            problem=f"the disk is full: {error}",
            fix=f"free some space under {folder.path.parent}" + going_on(folder, kind),
        )
    if isinstance(error, OSError) and error.errno is not None:
        return RunFailure(
            problem=f"the system refused: {error}",
            fix=f"check free disk space and permissions, then start again; details in {folder.log}"
            + going_on(folder, kind),
        )
    return RunFailure(
        problem=f"unexpected {name}: {text[:500]}",
        fix=f"this is a fault in stillroom or in the data; the traceback is in {folder.log}"
        + going_on(folder, kind),
    )


def interruption(folder: RunFolder, kind: RunKind, *, has_begun: bool, last: str) -> RunFailure:
    """Returns why a run whose process is gone has failed, and what to do about it.

    `has_begun` is whether its process had begun the work; `last` is the last line of its log.
    """
    what = "without finishing" if has_begun else "before it began"
    problem = f"the run's process ended {what}" + (f"; its log ends with: {last}" if last else "")
    look = f"read {folder.log}"
    if kind in _TRAINING:
        again = going_on(folder, kind) or "; it has no checkpoint yet, so start it anew"
        fix = f"{look}; if it was killed for memory: {_SMALLER}{again}"
    else:
        fix = (
            f"{look}; if it was killed for memory, lower batch_size or concurrency. "
            "A rollout run goes on where it stood when it is started again with the same output."
        )
    return RunFailure(problem=problem, fix=fix)


def going_on(folder: RunFolder, kind: RunKind) -> str:
    """Returns the text on resuming a training run from its last checkpoint; "" if it has none."""
    step = _last_step(folder, kind)
    if step is None:
        return ""
    return f"; then start_training(resume={folder.run_id}) goes on from {step}"


def _with_smaller_passes(folder: RunFolder, kind: RunKind) -> str:
    """Returns the text on resuming a training run with smaller microbatches; "" if it cannot be.

    Smaller microbatches need less memory and compute the same updates. A run without a
    checkpoint cannot be resumed.
    """
    step = _last_step(folder, kind)
    if step is None:
        return ""
    override = 'overrides=["model.microbatch_tokens=512"]'
    return f"; start_training(resume={folder.run_id}, {override}) goes on from {step}"


def _start_from(folder: RunFolder, kind: RunKind) -> str:
    """Returns the text on starting a new run from this run's last checkpoint; "" if it has none."""
    step = _last_step(folder, kind)
    if step is None:
        return ""
    return f"; model.path={folder.path / CHECKPOINTS / step} starts from the last good checkpoint"


def _last_step(folder: RunFolder, kind: RunKind) -> str | None:
    checkpoint = latest_checkpoint(folder.path) if kind in _TRAINING else None
    return checkpoint.name if checkpoint is not None else None

"""Turns the error that ended a run into the problem and the fix that its user reads.

For training, the fix names the checkpoint that the user can continue from. The functions only
read: they look for the run's checkpoints.
"""

import errno
import shutil
import signal
from contextlib import suppress
from itertools import chain

import msgspec

from stillroom.errors import DivergedError, EngineError, writable_text
from stillroom.lines import last_line
from stillroom.models.resolve import CHECKPOINTS
from stillroom.run_folder import LIMITS_FILE, ProcessEnd, RunFailure, RunFolder, RunState
from stillroom.train.config.resume import latest_checkpoint
from stillroom.types import RunKind, RunStatus

KILLED_AT_LIMIT = "killed, as it did not stop in time: "
"""The beginning of the last log line of a run that passed its limits; the limit follows."""
_TRAINING = frozenset({RunKind.SFT, RunKind.DPO, RunKind.DISTILL})
# Parts of torch's messages when memory runs out: on CUDA, on the CPU, and in CUDA's libraries.
_NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")
_LEAST_FREE = 1 << 16
"""On a disk with fewer bytes than this run.json cannot be written."""
_SMALLER = (
    "lower model.microbatch_tokens, model.max_length or concurrency, set "
    "model.gradient_checkpointing, or train an adapter (model.qlora_rank)"
)


def failure_of(error: BaseException, folder: RunFolder, kind: RunKind) -> RunFailure:
    """Returns why a run failed and what to do about it, given the error that ended it."""
    if isinstance(error, DivergedError):
        return RunFailure(problem=error.problem, fix=error.fix + _start_from(folder, kind))
    if isinstance(error, EngineError):
        return RunFailure(problem=error.problem, fix=error.fix + resume_hint(folder, kind))
    name, text = type(error).__name__, writable_text(str(error).strip())
    if isinstance(error, MemoryError) or any(mark in text.lower() for mark in _NO_MEMORY):
        return RunFailure(
            problem=f"out of memory: {text[:300] or name}",
            fix=_SMALLER + _with_smaller_passes(folder, kind) + _start_from(folder, kind),
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        full = _full_disk(folder, f"the disk: {text}", f"under {folder.path.parent}")
        return msgspec.structs.replace(full, fix=full.fix + resume_hint(folder, kind))
    if isinstance(error, OSError) and error.errno is not None:
        if _is_away(folder):
            # A path of that machine would be shown as the local path that it replaces.
            text = f"{error.strerror}, on the machine that the run was on"
        return RunFailure(
            problem=f"the system refused: {text}",
            fix=f"check free disk space and permissions, then start again; details in {folder.log}"
            + resume_hint(folder, kind),
        )
    return RunFailure(
        problem=f"unexpected {name}: {text[:500]}",
        fix=f"this is a fault in stillroom or in the data; the traceback is in {folder.log}"
        + resume_hint(folder, kind),
    )


def ending_of_gone(
    folder: RunFolder, state: RunState, end: ProcessEnd | None
) -> tuple[RunStatus, RunFailure]:
    """Returns how a run has ended whose process is gone, why, and what to do about it.

    `end` is what its keeper has noted; None if that is gone too, or the process ended by itself.
    """
    kind = state.kind
    if end is not None and end.out_of_memory:
        return RunStatus.FAILED, RunFailure(
            problem="out of memory: the system killed the run's process, which held "
            f"{end.memory_bytes / 1e9:.1f} GB",
            fix=_SMALLER + _with_smaller_passes(folder, kind) + _start_from(folder, kind),
        )
    if end is None and _is_full(folder):
        full = _full_disk(folder, f"the disk of {folder.path}", "on it")
        return RunStatus.FAILED, RunFailure(
            problem=f"{full.problem}: the run could not write its end",
            fix=f"{full.fix}; the reason is in {folder.log}" + _again(folder, kind),
        )
    ended = "without finishing" if state.status is not RunStatus.STARTING else "before it began"
    last = last_line(folder.log)
    return RunStatus.INTERRUPTED, RunFailure(
        problem=f"the run's process ended {ended}{_in_words(end)}"
        + (f"; its log ends with: {last}" if last else ""),
        fix=_first_step(folder, last) + _again(folder, kind),
    )


def _first_step(folder: RunFolder, last: str | None) -> str:
    was_at_limit = last is not None and KILLED_AT_LIMIT in last
    return "raise the limit that the log names" if was_at_limit else f"read {folder.log}"


def stopped_at_limit(folder: RunFolder, kind: RunKind, reason: str) -> RunFailure:
    """Returns why a run stopped by itself with its work kept, and how to resume it."""
    return RunFailure(
        problem=f"the run was stopped with its work kept: {reason}",
        fix="raise that limit" + _again(folder, kind),
    )


def _full_disk(folder: RunFolder, disk: str, place: str) -> RunFailure:
    """Returns that a disk is full; for a run that was sent here, that it is not the user's own."""
    if _is_away(folder):
        disk, place = "the disk of the machine that the run was on", "on it (see list_machines)"
    return RunFailure(problem=f"no space left on {disk}", fix=f"free some space {place}")


def _is_away(folder: RunFolder) -> bool:
    """Whether a run was sent to this machine; its texts are read on another one."""
    return (folder.path / LIMITS_FILE).exists()


def _is_full(folder: RunFolder) -> bool:
    return shutil.disk_usage(folder.path).free < _LEAST_FREE


def _in_words(end: ProcessEnd | None) -> str:
    if end is None:
        return ""
    if end.signal is None:
        return f" (exit code {end.exit_code})"
    with suppress(ValueError):
        return f" (killed by {signal.Signals(end.signal).name})"
    return f" (killed by signal {end.signal})"


def _again(folder: RunFolder, kind: RunKind) -> str:
    """Returns the hint on how to continue the work of a run that failed or was killed."""
    if kind in _TRAINING:
        return resume_hint(folder, kind) or "; it has no checkpoint yet, so start it again"
    if kind is RunKind.ROLLOUTS:
        return "; start it again with the same output, and it resumes where it stopped"
    return "; then start it again"


def resume_hint(folder: RunFolder, kind: RunKind) -> str:
    """Returns the text on resuming a training run from its last checkpoint; "" if it has none.

    Without one of its own it resumes from that of the run that it was resumed from.
    """
    for run in chain([folder], folder.earlier_runs()):
        if (step := _last_step(run, kind)) is not None:
            of_run = f" of {run.run_id}" if run is not folder else ""
            return f"; then start_training(resume={folder.run_id}) resumes at {step}{of_run}"
    return ""


def _with_smaller_passes(folder: RunFolder, kind: RunKind) -> str:
    """Returns the text on resuming a training run with smaller microbatches; "" if it cannot be.

    Smaller microbatches need less memory and compute the same updates. A run without a
    checkpoint cannot be resumed.
    """
    step = _last_step(folder, kind)
    if step is None:
        return ""
    override = 'overrides=["model.microbatch_tokens=512"]'
    return f"; start_training(resume={folder.run_id}, {override}) resumes at {step}"


def _start_from(folder: RunFolder, kind: RunKind) -> str:
    """Returns the text on starting a new run from this run's last checkpoint; "" if it has none."""
    step = _last_step(folder, kind)
    if step is None:
        return ""
    return f"; model.path={folder.path / CHECKPOINTS / step} starts from the last good checkpoint"


def _last_step(folder: RunFolder, kind: RunKind) -> str | None:
    checkpoint = latest_checkpoint(folder.path) if kind in _TRAINING else None
    return checkpoint.name if checkpoint is not None else None

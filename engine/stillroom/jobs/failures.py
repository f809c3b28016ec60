"""Turns the error that ended a run into the problem and the fix that its user reads.

For training, the fix names the checkpoint from which the user can resume.
"""

import errno
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.errors import DivergedError, EngineError, writable_text
from stillroom.lines import last_line
from stillroom.run_folder import LIMITS_FILE, ProcessEnd, RunFailure, RunFolder, RunState
from stillroom.train.config.resume import newest_checkpoint
from stillroom.types import RunKind, RunStatus

KILLED_AT_LIMIT = "killed, as it did not stop in time: "
"""The prefix of the last log line of a run that was killed at a limit; the limit follows."""
_TRAINING = frozenset({RunKind.SFT, RunKind.DPO, RunKind.DISTILL})
# Parts of torch's messages when memory runs out: on CUDA, on the CPU, and in CUDA's libraries.
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "alloc_failed")
_MIN_FREE_BYTES = 1 << 16
"""With fewer free bytes, the disk counts as full: run.json may not fit on it."""
_USE_LESS_MEMORY = (
    "lower model.microbatch_tokens, model.max_length or concurrency, set "
    "model.gradient_checkpointing, or train an adapter (model.qlora_rank)"
)


def failure_of(error: BaseException, folder: RunFolder, kind: RunKind) -> RunFailure:
    """Returns the problem and the fix for the error that ended a run."""
    if isinstance(error, DivergedError):
        return RunFailure(problem=error.problem, fix=error.fix + _new_run_hint(folder, kind))
    if isinstance(error, EngineError):
        return RunFailure(problem=error.problem, fix=error.fix + resume_hint(folder, kind))
    name, text = type(error).__name__, writable_text(str(error).strip())
    if isinstance(error, MemoryError) or any(mark in text.lower() for mark in _OUT_OF_MEMORY_TEXTS):
        return RunFailure(
            problem=f"out of memory: {text[:300] or name}",
            fix=_USE_LESS_MEMORY
            + _smaller_microbatches_hint(folder, kind)
            + _new_run_hint(folder, kind),
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        full = _disk_full_failure(folder, f"the disk: {text}", f"under {folder.path.parent}")
        return msgspec.structs.replace(full, fix=full.fix + resume_hint(folder, kind))
    if isinstance(error, OSError) and error.errno is not None:
        if _is_on_remote_machine(folder):
            # The path is left out: the user's machine would replace it by a local one.
            text = f"{error.strerror} (on the run's machine)"
        return RunFailure(
            problem=f"the operating system reported an error: {text}",
            fix=f"check free disk space and permissions; details are in {folder.log}"
            + _restart_hint(folder, kind),
        )
    return RunFailure(
        problem=f"unexpected {name}: {text[:500]}",
        fix=f"read the traceback in {folder.log}: if the data is wrong, correct it; otherwise "
        "this is a bug in Stillroom: report it with the traceback" + resume_hint(folder, kind),
    )


def outcome_of_dead_process(
    folder: RunFolder, state: RunState, end: ProcessEnd | None
) -> tuple[RunStatus, RunFailure]:
    """Returns the final status of a run whose process is gone, with the problem and the fix.

    `end` is the exit that its keeper recorded; None if the keeper is gone too, or if the process
    exited normally.
    """
    kind = state.kind
    if end is not None and end.out_of_memory:
        return RunStatus.FAILED, RunFailure(
            problem="out of memory: the operating system killed the run's process, which used "
            f"{end.memory_bytes / 1e9:.1f} GB",
            fix=_USE_LESS_MEMORY
            + _smaller_microbatches_hint(folder, kind)
            + _new_run_hint(folder, kind),
        )
    if end is None and _is_disk_full(folder):
        full = _disk_full_failure(folder, f"the disk of {folder.path}", "on it")
        return RunStatus.FAILED, RunFailure(
            problem=f"{full.problem}: the run could not write its final state",
            fix=f"{full.fix}; why the run ended is in {folder.log}" + _restart_hint(folder, kind),
        )
    when = "before finishing" if state.status is not RunStatus.STARTING else "before it started"
    log_line = last_line(folder.log)
    return RunStatus.INTERRUPTED, RunFailure(
        problem=f"the run's process exited {when}{_describe_exit(end)}"
        + (f"; its log ends with: {log_line}" if log_line else ""),
        fix=_fix_for_exit(folder, log_line) + _restart_hint(folder, kind),
    )


def _fix_for_exit(folder: RunFolder, log_line: str | None) -> str:
    """Returns the fix for a process that exited early, given the last line of its log."""
    was_at_limit = log_line is not None and KILLED_AT_LIMIT in log_line
    return "raise the limit that the log names" if was_at_limit else f"read {folder.log}"


def failure_at_limit(folder: RunFolder, kind: RunKind, reason: str) -> RunFailure:
    """Returns the failure of a run that was stopped at a limit, which says how to resume it."""
    return RunFailure(
        problem=f"the run was stopped, and its work is kept: {reason}",
        fix="raise that limit" + _restart_hint(folder, kind),
    )


def _disk_full_failure(folder: RunFolder, disk: str, where: str) -> RunFailure:
    """Returns the problem and fix for a full disk.

    disk, where: texts that name the disk and the place to free space; not used on a remote machine.
    """
    if _is_on_remote_machine(folder):
        disk, where = "the disk of the run's machine", "on it (see list_machines)"
    return RunFailure(problem=f"no space left on {disk}", fix=f"free some space {where}")


def _is_on_remote_machine(folder: RunFolder) -> bool:
    """Returns whether this is a remote machine, which executes the run for the user's machine."""
    return (folder.path / LIMITS_FILE).exists()


def _is_disk_full(folder: RunFolder) -> bool:
    return shutil.disk_usage(folder.path).free < _MIN_FREE_BYTES


def _describe_exit(end: ProcessEnd | None) -> str:
    """Returns a process's exit code or signal in parentheses; "" if it is unknown."""
    if end is None:
        return ""
    if end.signal is None:
        return f" (exit code {end.exit_code})"
    with suppress(ValueError):
        return f" (killed by {signal.Signals(end.signal).name})"
    return f" (killed by signal {end.signal})"


def _restart_hint(folder: RunFolder, kind: RunKind) -> str:
    """Returns the hint on how to resume or restart a run that failed or was killed."""
    if kind in _TRAINING:
        return resume_hint(folder, kind) or "; it has no checkpoint yet, so start it again"
    if kind is RunKind.RECIPE:
        return "; start it again with the same arguments, and it resumes where it stopped"
    if kind is RunKind.ROLLOUTS:
        return "; start it again with the same output, and it resumes where it stopped"
    return "; then start it again"


def resume_hint(folder: RunFolder, kind: RunKind) -> str:
    """Returns the hint on resuming a training run from its newest checkpoint; "" if it has none.

    That may be a checkpoint of the run that it continued.
    """
    if (checkpoint := _newest_checkpoint(folder, kind)) is None:
        return ""
    return f"; then start_training(resume={folder.run_id}) resumes at {_name(checkpoint, folder)}"


def _smaller_microbatches_hint(folder: RunFolder, kind: RunKind) -> str:
    """Returns the hint on resuming with smaller microbatches; "" if there is no checkpoint.

    Smaller microbatches need less memory and compute the same updates.
    """
    if (checkpoint := _newest_checkpoint(folder, kind)) is None:
        return ""
    override = 'overrides=["model.microbatch_tokens=512"]'
    return (
        f"; start_training(resume={folder.run_id}, {override}) resumes at "
        f"{_name(checkpoint, folder)}"
    )


def _new_run_hint(folder: RunFolder, kind: RunKind) -> str:
    """Returns the hint on starting a new run from the newest checkpoint; "" if there is none."""
    if (checkpoint := _newest_checkpoint(folder, kind)) is None:
        return ""
    return f"; a new run with model.path={checkpoint} starts from the last good checkpoint"


def _newest_checkpoint(folder: RunFolder, kind: RunKind) -> Path | None:
    return newest_checkpoint(folder) if kind in _TRAINING else None


def _name(checkpoint: Path, folder: RunFolder) -> str:
    """Returns a checkpoint's name, with its run unless that is the run in `folder`."""
    owner = checkpoint.parents[1].name
    return checkpoint.name if owner == folder.run_id else f"{checkpoint.name} of {owner}"

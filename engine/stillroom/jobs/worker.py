"""The main function of a run's process: locks the folder, does the work, writes the outcome."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stillroom.errors import EngineError, RunCancelledError
from stillroom.jobs.failures import KILLED_AT_LIMIT, failure_at_limit, failure_of
from stillroom.jobs.operations import Operation, run_operation
from stillroom.jobs.reporter import JobReporter
from stillroom.jobs.supervise import read_run
from stillroom.lineage import now
from stillroom.processes import process_start
from stillroom.reporting import stop_if_cancelled
from stillroom.run_folder import RunFailure, RunFolder, final_progress
from stillroom.secrecy.environments import PIPED_VARIABLES
from stillroom.secrecy.redaction import Redactor
from stillroom.teachers.run_limits import RunLimits, read_limits
from stillroom.types import RunKind, RunStatus

_WAIT_POLL_S = 0.5
_CANCEL_POLL_S = 0.5
_END_WAIT_S = 5.0
_SPARE_BYTES = 1 << 16
_LIMITS_POLL_S = 0.5


def main(
    operation_of_run: Callable[[RunKind], Operation], secrets: Mapping[str, str] | None = None
) -> int:
    """Does the work of the run whose folder is the first argument, and returns the exit code.

    The code is 0 if the run succeeded, 1 if not, and 2 if another process owns or owned the run.
    """
    folder, secrets = RunFolder(Path(sys.argv[1])), secrets or {}
    lock = folder.owner_lock()
    has_lock = lock.try_acquire()
    state = folder.read()
    # Another process may have done the run and exited already.
    if not has_lock or state.status.is_final:
        sys.stderr.write(f"{folder.run_id} is already running in another process, or has ended\n")
        return 2
    state = msgspec.structs.replace(
        state,
        status=RunStatus.RUNNING,
        started_at=now(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()),
    )
    folder.write(state)
    reporter = JobReporter(folder, state, Redactor(secrets.values()))
    canceller = _Canceller(reporter)
    signal.signal(signal.SIGTERM, lambda _number, _frame: canceller.cancel_now())
    watching = _watching_cancel_mark(folder, canceller)
    with _reserved_disk_space(folder), watching, enforcing_limits(folder, canceller):
        outcome = _work(operation_of_run(state.kind), folder, canceller, secrets)
        outcome = _close_reporter(reporter, outcome, folder)
    if outcome["status"] is RunStatus.CANCELLED and canceller.limit is not None:
        outcome["error"] = failure_at_limit(folder, state.kind, canceller.limit)
    has_succeeded = outcome["status"] is RunStatus.SUCCEEDED
    progress = final_progress(reporter.state.progress, is_complete=has_succeeded)
    final = msgspec.structs.replace(reporter.state, ended_at=now(), progress=progress, **outcome)
    folder.write(final)
    lock.release()
    return 0 if has_succeeded else 1


class _Canceller:
    """Cancels a run's work, which polls its reporter or gets an exception (see `raising`)."""

    def __init__(self, reporter: JobReporter) -> None:
        self.reporter = reporter
        self.limit: str | None = None
        """The limit that stopped the run; None if a user cancelled it."""
        self._is_raising = False

    @property
    def teacher_usd(self) -> float:
        """What the run has spent on endpoints so far, in US dollars."""
        return self.reporter.state.metrics.get("cost_usd") or 0.0

    def cancel_now(self) -> None:
        """Cancels the work; called by the main thread's signal handler."""
        self.reporter.cancel()
        if self._is_raising:
            self._is_raising = False
            raise RunCancelledError

    def cancel_from_any_thread(self, limit: str | None = None) -> None:
        """Cancels the work, optionally because of a limit; any thread may call this."""
        if not self.reporter.is_cancelled():
            self.limit = limit
        self.reporter.cancel()
        if self._is_raising:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def raising(self, *, is_raising: bool) -> Generator[None]:
        """Makes a cancellation raise RunCancelledError in the block if `is_raising`.

        This is for work that does not poll for a cancellation.
        """
        self._is_raising = is_raising
        try:
            yield
        finally:
            self._is_raising = False


@contextmanager
def _reserved_disk_space(folder: RunFolder) -> Generator[None]:
    """Reserves disk space, so that the final state can be written even if the disk is full."""
    spare = folder.path / ".spare"
    # Without it a full disk is still detected, but only when the run is read.
    with suppress(OSError):
        spare.write_bytes(os.urandom(_SPARE_BYTES))
    try:
        yield
    finally:
        spare.unlink(missing_ok=True)


@contextmanager
def _watching_cancel_mark(folder: RunFolder, canceller: _Canceller) -> Generator[None]:
    """Cancels the run once its folder has the cancel mark, even if no signal arrives."""
    ended = threading.Event()

    def watch() -> None:
        while not folder.cancel_mark.exists():
            if ended.wait(_CANCEL_POLL_S):
                return
        canceller.cancel_from_any_thread()

    if folder.cancel_mark.exists():
        canceller.reporter.cancel()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_WAIT_S)


def _close_reporter(
    reporter: JobReporter, outcome: dict[str, Any], folder: RunFolder
) -> dict[str, Any]:
    """Closes the reporter; returns the outcome, which is a failure if events cannot be written."""
    try:
        reporter.close()
    except OSError as error:
        sys.stderr.write(reporter.redactor.redact_text(traceback.format_exc()))
        if outcome["status"] is RunStatus.SUCCEEDED:
            return _outcome_of_error(error, folder, reporter)
    return outcome


def piped_secrets() -> dict[str, str]:
    """Returns the secrets that the parent wrote to standard input; empty if that is a terminal."""
    data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    # No child process may read the rest of standard input, or wait for it.
    with Path(os.devnull).open("rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    secrets = msgspec.json.decode(data, type=dict[str, str]) if data else {}
    # On another machine, variables such as HF_TOKEN also come through the pipe.
    names = os.environ.pop(PIPED_VARIABLES, "").split(",")
    os.environ.update({name: secrets[name] for name in names if name in secrets})
    return secrets


def _work(
    operation: Operation, folder: RunFolder, canceller: _Canceller, secrets: Mapping[str, str]
) -> dict[str, Any]:
    """Does the run's work and returns the fields of its final state: status, result or error."""
    reporter = canceller.reporter
    try:
        stop_if_cancelled(reporter)
        _wait_for_earlier_runs(folder, reporter)
        folder.check_inputs()
        # Work that can also be done within a call has no reporter to poll, so a cancellation is
        # raised as an exception.
        with canceller.raising(is_raising=operation.run_if_large is not None):
            result = run_operation(operation, folder, reporter, secrets)
        error = operation.run.error_of(result) if operation.run is not None else None
        redacted = reporter.redactor.redact_value(msgspec.to_builtins(result))
        if error is None:
            return {"status": RunStatus.SUCCEEDED, "result": redacted}
        return {**_outcome_of_error(error, folder, reporter), "result": redacted}
    # A run's outermost handler: any error becomes its final state, and the log gets the traceback.
    except BaseException as error:
        sys.stderr.write(reporter.redactor.redact_text(traceback.format_exc()))
        return _outcome_of_error(_error_to_report(error), folder, reporter)


def _wait_for_earlier_runs(folder: RunFolder, reporter: JobReporter) -> None:
    """Waits until the runs that this one is queued behind have ended, successfully or not.

    Raises RunCancelledError if the run is cancelled.
    """
    start_after = folder.read_request().start_after
    if start_after is None:
        return
    for earlier_id in start_after.after:
        while not read_run(RunFolder(folder.path.with_name(earlier_id))).status.is_final:
            stop_if_cancelled(reporter)
            reporter.progress(0, 1, unit="runs", phase=f"wait for {earlier_id}")
            time.sleep(_WAIT_POLL_S)


def _outcome_of_error(
    error: BaseException, folder: RunFolder, reporter: JobReporter
) -> dict[str, Any]:
    """Returns the fields of the final state for the error that ended a run, or its cancellation."""
    redactor = reporter.redactor
    if isinstance(error, RunCancelledError):
        result = redactor.redact_value(msgspec.to_builtins(error.result))
        return {"status": RunStatus.CANCELLED, "result": result}
    failure = failure_of(error, folder, reporter.state.kind)
    redacted = RunFailure(
        problem=redactor.redact_text(failure.problem), fix=redactor.redact_text(failure.fix)
    )
    return {"status": RunStatus.FAILED, "error": redacted}


def _error_to_report(error: BaseException) -> BaseException:
    """Returns the most important error inside an exception group, or the error itself.

    A cancellation comes first, then an EngineError, then the first error of any kind.
    """
    leaves = [error]
    while any(isinstance(leaf, BaseExceptionGroup) for leaf in leaves):
        leaves = [inner for leaf in leaves for inner in _inner_errors(leaf)]
    for kind in (RunCancelledError, EngineError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


def _inner_errors(error: BaseException) -> Sequence[BaseException]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else [error]


class Stoppable(Protocol):
    """A run's work, which can be cancelled and reports what it has spent."""

    @property
    def teacher_usd(self) -> float:
        """What the run has spent on endpoints so far, in US dollars."""
        ...

    def cancel_from_any_thread(self, limit: str | None = None) -> None:
        """Cancels the work because of this limit; any thread may call this."""
        ...


def _kill_this_process(reason: str) -> None:
    """Kills this process, and writes the limit that it exceeded as the log's last line."""
    # The run's final state quotes it.
    sys.stderr.write(f"{KILLED_AT_LIMIT}{reason}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def enforcing_limits(folder: RunFolder, work: Stoppable) -> Generator[None]:
    """Enforces the run's limits in a thread during the block: see `enforce_limits`."""
    limits = read_limits(folder.path)
    if limits is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=enforce_limits, args=(limits, work, ended.wait), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_WAIT_S)


def enforce_limits(
    limits: RunLimits,
    work: Stoppable,
    wait_for_end: Callable[[float], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    kill: Callable[[str], None] = _kill_this_process,
) -> None:
    """Cancels the work when a limit is reached, and calls `kill` if it does not stop in time.

    `wait_for_end` waits up to the given number of seconds, and returns whether the work has ended.
    `kill` is called with the limit as text.
    """
    reached: str | None = None
    while not wait_for_end(_LIMITS_POLL_S):
        teacher_usd = work.teacher_usd
        if reached is not None and limits.is_overdue(clock(), teacher_usd):
            kill(reached)
            return
        reason = None if reached is not None else limits.stop_reason(clock(), teacher_usd)
        if reason is not None:
            reached = reason
            work.cancel_from_any_thread(reason)

"""The main function of a run's process: it locks the folder, does the work, writes the outcome."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from stillroom.errors import EngineError, RunCancelledError, RunError
from stillroom.files import file_sha256
from stillroom.jobs.failures import failure_of
from stillroom.jobs.operations import Operation, run_operation
from stillroom.jobs.reporter import JobReporter
from stillroom.jobs.supervise import read_run
from stillroom.lineage import now
from stillroom.run_folder import RunFolder
from stillroom.types import RunKind, RunStatus

_WAIT_POLL_S = 0.5


def main(operation_of_run: Callable[[RunKind], Operation]) -> int:
    """Does the work of the run whose folder is the first argument, and returns the exit code.

    The code is 0 if the run succeeded, 1 if not, and 2 if another process has the run already.
    """
    folder = RunFolder(Path(sys.argv[1]))
    lock = folder.owner_lock()
    if not lock.try_acquire():
        sys.stderr.write(f"{folder.run_id} already has a process\n")
        return 2
    state = msgspec.structs.replace(
        folder.read(),
        status=RunStatus.RUNNING,
        started_at=now(),
        pid=os.getpid(),
        pid_started_at=psutil.Process().create_time(),
    )
    folder.write(state)
    reporter = JobReporter(folder, state)
    signal.signal(signal.SIGTERM, lambda _number, _frame: reporter.cancel())
    if folder.cancel_mark.exists():
        reporter.cancel()
    ending = _work(operation_of_run(state.kind), folder, reporter)
    reporter.close()
    folder.write(msgspec.structs.replace(reporter.state, ended_at=now(), **ending))
    lock.release()
    return 0 if ending["status"] is RunStatus.SUCCEEDED else 1


def _work(operation: Operation, folder: RunFolder, reporter: JobReporter) -> dict[str, Any]:
    """Does the run's work and returns the fields of its final state: status, result or error."""
    try:
        _wait_for_others(folder, reporter)
        result = run_operation(operation, folder, reporter)
        return {"status": RunStatus.SUCCEEDED, "result": msgspec.to_builtins(result)}
    # A run's outermost handler: any error becomes its final state, and the log gets the traceback.
    except BaseException as error:
        traceback.print_exc()
        return _ending(_cause(error), folder, reporter.state.kind)


def _wait_for_others(folder: RunFolder, reporter: JobReporter) -> None:
    """Waits until the runs that this one is queued behind have ended, in whatever way.

    Raises RunCancelledError if the run is asked to stop, and RunError if a file that the request
    depends on has changed in the meantime.
    """
    start_after = folder.read_request().start_after
    if start_after is None:
        return
    for earlier_id in start_after.after:
        while not read_run(RunFolder(folder.path.with_name(earlier_id))).status.is_final:
            if reporter.is_cancelled():
                raise RunCancelledError
            reporter.progress(0, 1, unit="runs", phase=f"wait for {earlier_id}")
            time.sleep(_WAIT_POLL_S)
    for path, digest in start_after.files.items():
        if not Path(path).is_file() or file_sha256(Path(path)) != digest:
            raise RunError(
                f"{path} has changed while this run waited for its turn",
                "start it again if it is still wanted, with model.path as an override",
            )


def _ending(error: BaseException, folder: RunFolder, kind: RunKind) -> dict[str, Any]:
    if isinstance(error, RunCancelledError):
        result = msgspec.to_builtins(error.result)
        return {"status": RunStatus.CANCELLED, "result": result}
    return {"status": RunStatus.FAILED, "error": failure_of(error, folder, kind)}


def _cause(error: BaseException) -> BaseException:
    """Returns the one error to report out of the exception groups that task groups raise.

    A cancellation comes first, then an EngineError, then the first error of any kind.
    """
    leaves = [error]
    while any(isinstance(leaf, BaseExceptionGroup) for leaf in leaves):
        leaves = [inner for leaf in leaves for inner in _inside(leaf)]
    for kind in (RunCancelledError, EngineError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


def _inside(error: BaseException) -> Sequence[BaseException]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else [error]

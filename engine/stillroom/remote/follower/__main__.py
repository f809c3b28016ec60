"""`python -m stillroom.remote.follower FOLDER`: follows a run on another machine.

Secrets are read from standard input, as in a run's own process. The follower's lock was acquired by
the process that started this one, and is inherited from it.
"""

import os
import sys
from pathlib import Path

import msgspec

from stillroom.errors import EngineError
from stillroom.files import FileLock, read_json
from stillroom.jobs.remote_runs import LOCK_VARIABLE
from stillroom.remote.follower.follower import Follower
from stillroom.remote.follower.local_run import LocalRun
from stillroom.remote.hosts import open_host
from stillroom.remote.records import JobSpec
from stillroom.run_folder import FOLLOWER_LOCK, REMOTE_FILE, RunFolder
from stillroom.types import RunStatus


def main() -> int:
    """Follows the run; returns exit code 2 if another process already does."""
    folder = RunFolder(Path(sys.argv[1]))
    data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    secrets = msgspec.json.decode(data, type=dict[str, str]) if data else {}
    # Without the variable, it was started manually.
    lock = FileLock(folder.path / FOLLOWER_LOCK)
    if os.environ.pop(LOCK_VARIABLE, None) is None and not lock.try_acquire():
        sys.stderr.write(f"{folder.run_id} already has a follower\n")
        return 2
    spec = read_json(folder.path / REMOTE_FILE, JobSpec)
    try:
        host = open_host(spec.machine, run=folder.path)
    except EngineError as error:
        _record_open_error(LocalRun(folder, spec), error)
        return 1
    Follower(folder, spec, host, secrets).run()
    return 0


def _record_open_error(run: LocalRun, error: EngineError) -> None:
    """Records why the machine cannot be opened; a run that has not started fails."""
    if run.view.has_started:
        run.view.record_problem(str(error))
        return
    run.end(RunStatus.FAILED, error.problem, error.fix)
    run.view.record_done()


if __name__ == "__main__":
    sys.exit(main())

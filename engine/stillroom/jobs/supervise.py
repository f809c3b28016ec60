"""Starts runs, reads their states and stops them; several servers may do so concurrently."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stillroom.files import write_json
from stillroom.jobs import remote_runs
from stillroom.jobs.detached import start_detached
from stillroom.jobs.failures import outcome_of_dead_process
from stillroom.lineage import now
from stillroom.processes import kill_family, process_start
from stillroom.run_folder import (
    LAUNCH_FILE,
    NewRun,
    ProcessEnd,
    RunFolder,
    RunState,
    create_run,
    final_progress,
)
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus

_START_WAIT_S = 0.8
_START_LIMIT_S = 60.0
_KILL_AFTER_S = 10.0
_END_WAIT_S = 1.0
_POLL_S = 0.05


class _Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The content of launch.json, which identifies the run's process until run.json has its pid."""

    pid: int
    process_start: str | None = None
    """When the process started, which distinguishes it from later processes with the same pid."""


def start_run(
    workspace: Workspace,
    kind: RunKind,
    request: dict[str, Any],
    *,
    environment: dict[str, str],
    secrets: Mapping[str, str] | None = None,
    new: NewRun | None = None,
) -> RunState:
    """Starts a detached process for the request and returns the run's state within a second.

    The `secrets` are passed through a pipe, so that they are in no file and no environment. The
    process begins its work once the runs that it is queued behind have ended. It fails if an input
    file has changed by then.
    """
    folder = create_run(workspace, kind, request, new)
    if folder.is_remote:
        remote_runs.start_follower(folder, secrets or {}, environment)
        return folder.read()
    launch_run(folder, workspace.root, environment=environment, secrets=secrets or {})
    deadline = time.monotonic() + _START_WAIT_S
    while folder.read().status is RunStatus.STARTING and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return read_run(folder)


def launch_run(
    folder: RunFolder,
    workspace: Path,
    *,
    environment: Mapping[str, str],
    secrets: Mapping[str, str],
    inherited_fds: Sequence[int] = (),
) -> None:
    """Starts the detached process of a run whose folder has its request, and records its pid.

    inherited_fds: file descriptors that are inherited, with the locks that this process holds.
    """
    pid = start_detached(
        "stillroom.jobs.keeper",
        folder.path,
        cwd=workspace,
        log=folder.log,
        environment=environment,
        secrets=secrets,
        inherited_fds=inherited_fds,
    )
    launch = _Launch(pid=pid, process_start=process_start(pid))
    if launch.process_start is not None:
        write_json(folder.path / LAUNCH_FILE, launch)


def read_run(folder: RunFolder) -> RunState:
    """Returns the current state of a run; if its process is gone, writes the run's final state.

    For a run on another machine, returns the state that its local follower process last wrote,
    even if the other machine cannot be reached. A follower that died is restarted.
    Raises DataError if run.json is damaged.
    """
    state = folder.read()
    if folder.is_remote:
        remote_runs.ensure_follower(folder)
        return state
    if state.status.is_final or _may_be_starting(folder, state):
        return state
    lock = folder.owner_lock()
    if not lock.try_acquire():
        return state
    try:
        # No other process writes while this one holds the lock. The owner may have finished just
        # before it was acquired.
        state = folder.read()
        return state if state.status.is_final else _close_dead_run(folder, state)
    finally:
        lock.release()


def cancel_run(folder: RunFolder) -> RunState:
    """Asks a run to stop and returns its state; a call at least 10 seconds later kills it.

    A run that stops keeps its work: finished rollouts stay on disk, and training writes a
    checkpoint first. Killing also ends the other processes of the run.
    """
    state = read_run(folder)
    if state.status.is_final:
        return state
    if folder.is_remote:
        return _cancel_by_follower(folder)
    pid = _live_pid(folder, state)
    waited_s = folder.seconds_since_cancel()
    if waited_s is None:
        # The run's process polls for this mark, so it stops even if no signal can reach it.
        folder.ask_to_cancel()
        if pid is not None:
            with suppress(ProcessLookupError):  # it has exited since
                os.kill(pid, signal.SIGTERM)
    elif waited_s >= _KILL_AFTER_S and pid is not None:
        return kill_run(folder)
    return state


def _cancel_by_follower(folder: RunFolder) -> RunState:
    """Records a cancellation, which the run's follower forwards to the other machine."""
    if (folder.seconds_since_cancel() or 0.0) >= _KILL_AFTER_S:
        remote_runs.ask_to_kill(folder)
    folder.ask_to_cancel()
    return folder.read()


def kill_run(folder: RunFolder) -> RunState:
    """Kills a run's processes and returns its state, which is cancelled once they have ended."""
    state = read_run(folder)
    if state.status.is_final:
        return state
    pid = _live_pid(folder, state)
    folder.ask_to_cancel()
    if pid is None:
        return read_run(folder)
    kill_family(pid)
    return _wait_until_dead(folder)


def _may_be_starting(folder: RunFolder, state: RunState) -> bool:
    """Returns whether the run's process may be alive but not have acquired its lock yet.

    A free lock then does not mean that the process is gone. Without a launch.json, the process may
    be alive for up to a minute after the request.
    """
    if state.status is not RunStatus.STARTING:
        return False
    launch = _read_launch(folder)
    if launch is not None:
        return _is_alive(launch)
    return abs(time.time() - folder.request_file.stat().st_mtime) < _START_LIMIT_S


def _live_pid(folder: RunFolder, state: RunState) -> int | None:
    """Returns the pid of the run's process; None if it has exited, even if its pid is reused."""
    launch = _read_launch(folder)
    if state.pid is not None:
        launch = _Launch(pid=state.pid, process_start=state.process_start)
    return launch.pid if launch is not None and _is_alive(launch) else None


def _read_launch(folder: RunFolder) -> _Launch | None:
    """Returns the content of launch.json; None if it is missing or unreadable."""
    try:
        data = (folder.path / LAUNCH_FILE).read_bytes()
        return msgspec.json.decode(data, type=_Launch)
    except (FileNotFoundError, ValueError):
        return None


def _is_alive(launch: _Launch) -> bool:
    """Returns whether the launched process still runs, and no later one has its pid."""
    start = process_start(launch.pid)
    return start is not None and start == launch.process_start


def _wait_until_dead(folder: RunFolder) -> RunState:
    """Waits until a killed run's process has released its lock, then marks the run as cancelled.

    Returns the run's state, which is unchanged if the lock is still held after 10 seconds.
    """
    deadline = time.monotonic() + _KILL_AFTER_S
    while not (state := read_run(folder)).status.is_final and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return state


def _close_dead_run(folder: RunFolder, state: RunState) -> RunState:
    """Writes and returns the final state of a run whose process is gone.

    The caller holds the run's lock.
    """
    status, error = RunStatus.CANCELLED, None
    if folder.seconds_since_cancel() is None:
        status, error = outcome_of_dead_process(folder, state, _wait_for_process_end(folder))
    state = msgspec.structs.replace(
        state, status=status, ended_at=now(), error=error, progress=final_progress(state.progress)
    )
    # On a full disk the true state is returned although it is not written; the next read_run
    # tries to write it again.
    with suppress(OSError):
        folder.write(state)
    return state


def _wait_for_process_end(folder: RunFolder) -> ProcessEnd | None:
    """Returns how the run's process exited; waits a moment for its keeper to record that."""
    launch = _read_launch(folder)
    deadline = time.monotonic() + _END_WAIT_S
    while True:
        if (end := folder.read_process_end()) is not None:
            return end
        if launch is None or not _is_alive(launch) or time.monotonic() > deadline:
            # The keeper may have recorded it since it was read above.
            return folder.read_process_end()
        time.sleep(_POLL_S)

"""Starts runs, reads their states and stops them; several servers may do so at the same time."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from stillroom.files import write_json
from stillroom.jobs.failures import interruption
from stillroom.lineage import now
from stillroom.run_folder import (
    RunFailure,
    RunFolder,
    RunState,
    StartAfter,
    create_run,
)
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus

_START_WAIT_S = 0.8
_START_LIMIT_S = 60.0
_KILL_AFTER_S = 10.0
_POLL_S = 0.05


class _Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The content of launch.json: the run's process as the program that started it saw it.

    It identifies the process until that has written its own pid to run.json.
    """

    pid: int
    pid_started_at: float
    """When the process started, in seconds since the epoch; a pid alone may be used again."""


def start_run(
    workspace: Workspace,
    kind: RunKind,
    request: dict[str, Any],
    *,
    environment: dict[str, str],
    start_after: StartAfter | None = None,
) -> RunState:
    """Starts a detached process for the request and returns the run's state within a second.

    The process begins its work once the runs in `start_after` have ended; at once if it is None.
    """
    folder = create_run(workspace, kind, request, start_after=start_after)
    with folder.log.open("ab") as log:
        process = subprocess.Popen(
            # -P: modules in a user's folder must not shadow ours.
            [sys.executable, "-P", "-m", "stillroom.api.worker", str(folder.path)],
            cwd=workspace.root,
            env={**environment, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    # Without a thread that waits for it, the ended process stays a zombie while this one lives.
    threading.Thread(target=process.wait, daemon=True).start()
    started_at = _process_start(process.pid)
    if started_at is not None:
        launch = _Launch(pid=process.pid, pid_started_at=started_at)
        write_json(folder.path / "launch.json", launch)
    deadline = time.monotonic() + _START_WAIT_S
    while folder.read().status is RunStatus.STARTING and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return read_run(folder)


def read_run(folder: RunFolder) -> RunState:
    """Returns the current state of a run, and marks it `interrupted` if its process is gone."""
    state = folder.read()
    if state.status.is_final or _may_be_starting(folder, state):
        return state
    lock = folder.owner_lock()
    if not lock.try_acquire():
        return state
    try:
        # While we hold the lock nobody else writes. The owner may have finished just before.
        state = folder.read()
        if state.status.is_final:
            return state
        return _close(folder, state, RunStatus.INTERRUPTED, _interruption(folder, state))
    finally:
        lock.release()


def cancel_run(folder: RunFolder) -> RunState:
    """Asks a run to stop and returns its state; a call at least 10 seconds later kills it.

    A run that stops keeps its work: finished rollouts stay on disk, and training writes a
    checkpoint first. Killing also ends the other processes of its process group.
    """
    state = read_run(folder)
    if state.status.is_final:
        return state
    process = _process_of(folder, state)
    if folder.cancel_mark.exists():
        asked_s = time.time() - folder.cancel_mark.stat().st_mtime
        if asked_s >= _KILL_AFTER_S and process is not None:
            _kill_group(process)
            return _await_death(folder)
    else:
        folder.cancel_mark.touch()
        if process is not None:
            process.send_signal(signal.SIGTERM)
    return state


def _may_be_starting(folder: RunFolder, state: RunState) -> bool:
    """Returns whether the run's process may still have to take its lock.

    A free lock is then no sign that the process is gone. If the process is not known, this is
    assumed for a minute after the request.
    """
    if state.status is not RunStatus.STARTING:
        return False
    if _process_of(folder, state) is not None:
        return True
    age_s = time.time() - folder.request_file.stat().st_mtime
    return age_s < _START_LIMIT_S and not (folder.path / "launch.json").exists()


def _process_of(folder: RunFolder, state: RunState) -> psutil.Process | None:
    """Returns the run's process, or None if it has ended, even if its pid has been used again."""
    pid, started_at = state.pid, state.pid_started_at
    if pid is None:
        launch_file = folder.path / "launch.json"
        if not launch_file.exists():
            return None
        launch = msgspec.json.decode(launch_file.read_bytes(), type=_Launch)
        pid, started_at = launch.pid, launch.pid_started_at
    try:
        process = psutil.Process(pid)
        if process.create_time() != started_at or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.NoSuchProcess:
        return None
    return process


def _process_start(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def _kill_group(process: psutil.Process) -> None:
    """Kills a run's process and all others of the process group that it was started to lead."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _await_death(folder: RunFolder) -> RunState:
    """Waits until a killed run's process has released its lock, then marks the run as cancelled.

    Returns the run's state, which is unchanged if the lock is still held after 10 seconds.
    """
    lock = folder.owner_lock()
    deadline = time.monotonic() + _KILL_AFTER_S
    while not lock.try_acquire():
        if time.monotonic() > deadline:
            return folder.read()
        time.sleep(_POLL_S)
    try:
        state = folder.read()
        return state if state.status.is_final else _close(folder, state, RunStatus.CANCELLED, None)
    finally:
        lock.release()


def _close(
    folder: RunFolder, state: RunState, status: RunStatus, error: RunFailure | None
) -> RunState:
    state = msgspec.structs.replace(state, status=status, ended_at=now(), error=error)
    # On a full disk the true state is returned although it is not written; the next read_run
    # tries to write it again.
    with suppress(OSError):
        folder.write(state)
    return state


def _interruption(folder: RunFolder, state: RunState) -> RunFailure:
    return interruption(
        folder,
        state.kind,
        has_begun=state.status is not RunStatus.STARTING,
        last=_last_line(folder.log),
    )


def _last_line(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 2000))
        lines = stream.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""

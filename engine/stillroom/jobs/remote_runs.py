"""The local side of runs on other machines.

A local process, the follower, does everything that involves the other machine and is the only one
that writes the run's folder (`remote/follower/`). This module starts it, and restarts it if it has
died; no function here waits for the network.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.errors import DataError
from stillroom.files import FileLock, read_json, write_json
from stillroom.jobs.detached import start_detached
from stillroom.processes import RUN_MARK_VARIABLE
from stillroom.run_folder import (
    FOLLOWER_FILE,
    FOLLOWER_LOCK,
    FOLLOWER_LOG,
    KILL_MARK,
    REMOTE_FILE,
    RunFolder,
    read_remote_state,
)
from stillroom.secrecy.environments import provisioning_environment, run_environment
from stillroom.settings import Workspace

LOCK_VARIABLE = "STILLROOM_FOLLOWER_LOCK"
"""The environment variable with the inherited file descriptor of the follower's lock."""
_FOLLOWER = "stillroom.remote.follower.__main__"
_RESTART_AFTER_S = 5.0
"""The minimum number of seconds between two starts of a follower."""


class FollowerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The content of follower.json: what is needed to restart a run's follower."""

    secret_names: list[str] = []
    """The names, not the values, of the secrets passed to it when the run was started."""
    started_at: float = 0.0
    """When a follower was last started, in seconds since the epoch."""


class _JobSpec(msgspec.Struct, frozen=True):
    """The part of remote.json that is needed to start a follower."""

    key_names: list[str] = []
    machine: dict[str, object] = {}

    @property
    def is_rented(self) -> bool:
        """Whether the follower provisions the machine through a cloud."""
        return self.machine.get("skypilot") is not None


def read_follower_start(folder: RunFolder) -> FollowerStart:
    """Returns the content of a run's follower.json, or the defaults if there is none."""
    with suppress(FileNotFoundError, DataError):
        return read_json(folder.path / FOLLOWER_FILE, FollowerStart)
    return FollowerStart()


def start_follower(
    folder: RunFolder, secrets: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    """Starts the follower of a new run, which gets the run's secrets through a pipe."""
    lock = FileLock(folder.path / FOLLOWER_LOCK)
    if lock.try_acquire():
        try:
            _start(folder, lock, secrets, environment, list(secrets))
        finally:
            lock.release()


def ensure_follower(folder: RunFolder) -> None:
    """Restarts a run's follower, with newly read keys, if it died before it was done."""
    remote_state = read_remote_state(folder.path)
    # A run's process must not start a follower, which would be killed with the run.
    is_over = remote_state is None or remote_state.phase == "over"
    if is_over or RUN_MARK_VARIABLE in os.environ:
        return
    lock = FileLock(folder.path / FOLLOWER_LOCK)
    # A follower could not write to a read-only folder.
    with suppress(OSError):
        if not lock.try_acquire():
            return
        try:
            start = read_follower_start(folder)
            if abs(time.time() - start.started_at) >= _RESTART_AFTER_S:
                root = Path(folder.read_request().workspace)
                spec = read_json(folder.path / REMOTE_FILE, _JobSpec)
                secrets = Workspace(root).read_keys(spec.key_names)
                _start(folder, lock, secrets, run_environment(root), start.secret_names)
        finally:
            lock.release()


def ask_to_kill(folder: RunFolder) -> None:
    """Writes the mark file that makes the follower kill the run's processes on its machine."""
    with suppress(FileExistsError):
        (folder.path / KILL_MARK).touch(exist_ok=False)


def _start(
    folder: RunFolder,
    lock: FileLock,
    secrets: Mapping[str, str],
    environment: Mapping[str, str],
    secret_names: list[str],
) -> None:
    """Starts the follower's process, which inherits the lock, and writes follower.json."""
    start = FollowerStart(secret_names=secret_names, started_at=time.time())
    write_json(folder.path / FOLLOWER_FILE, start)
    root = Path(folder.read_request().workspace)
    if read_json(folder.path / REMOTE_FILE, _JobSpec).is_rented:
        environment = {**environment, **provisioning_environment(root)}
    start_detached(
        _FOLLOWER,
        folder.path,
        cwd=root,
        log=folder.path / FOLLOWER_LOG,
        environment={**environment, LOCK_VARIABLE: str(lock.handle)},
        secrets=secrets,
        inherited_fds=[lock.handle],
    )

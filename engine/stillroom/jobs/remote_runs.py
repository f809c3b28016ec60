"""Runs whose process is on another machine, as the programs here see them.

A process here, the follower, does all that concerns the other machine and is the only one that
writes the run's folder (`remote/follower/`). Here it is started, and started again when it has
died; nothing here waits for a network.
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
    read_elsewhere,
)
from stillroom.secrecy.environments import renting_environment, run_environment
from stillroom.settings import Workspace

LOCK_VARIABLE = "STILLROOM_FOLLOWER_LOCK"
"""The variable with the number of the open file by which a follower was given its lock."""
_FOLLOWER = "stillroom.remote.follower.__main__"
_AGAIN_AFTER_S = 5.0
"""A follower that dies at once is not started more often than this."""


class FollowerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The content of follower.json: what the follower of a run needs to be started again."""

    secret_names: list[str] = []
    """The names of the secrets that it was given when the run was started; no values."""
    started_at: float = 0.0
    """When a follower was started last, in seconds since the epoch."""


class _JobSpec(msgspec.Struct, frozen=True):
    """The part of remote.json that is needed to start a follower."""

    key_names: list[str] = []
    machine: dict[str, object] = {}

    @property
    def is_rented(self) -> bool:
        """Whether the follower provisions the machine through a cloud."""
        return self.machine.get("skypilot") is not None


def read_follower_start(folder: RunFolder) -> FollowerStart:
    """Returns what is known of a run's follower."""
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
    """Starts a run's follower again if it has died before all was done, with the keys by name."""
    view = read_elsewhere(folder.path)
    # A run's process must not start a follower, which would be killed with the run; a server
    # also calls this.
    if view is None or view.phase == "over" or RUN_MARK_VARIABLE in os.environ:
        return
    lock = FileLock(folder.path / FOLLOWER_LOCK)
    # In a folder that cannot be written there is nothing to follow.
    with suppress(OSError):
        if not lock.try_acquire():
            return
        try:
            known = read_follower_start(folder)
            if abs(time.time() - known.started_at) >= _AGAIN_AFTER_S:
                root = Path(folder.read_request().workspace)
                spec = read_json(folder.path / REMOTE_FILE, _JobSpec)
                secrets = Workspace(root).read_keys(spec.key_names)
                _start(folder, lock, secrets, run_environment(root), known.secret_names)
        finally:
            lock.release()


def ask_to_kill(folder: RunFolder) -> None:
    """Marks the run, so that its processes on the other machine are killed."""
    with suppress(FileExistsError):
        (folder.path / KILL_MARK).touch(exist_ok=False)


def _start(
    folder: RunFolder,
    lock: FileLock,
    secrets: Mapping[str, str],
    environment: Mapping[str, str],
    secret_names: list[str],
) -> None:
    known = FollowerStart(secret_names=secret_names, started_at=time.time())
    write_json(folder.path / FOLLOWER_FILE, known)
    root = Path(folder.read_request().workspace)
    if read_json(folder.path / REMOTE_FILE, _JobSpec).is_rented:
        environment = {**environment, **renting_environment(root)}
    start_detached(
        _FOLLOWER,
        folder.path,
        cwd=root,
        log=folder.path / FOLLOWER_LOG,
        environment={**environment, LOCK_VARIABLE: str(lock.handle)},
        secrets=secrets,
        kept_open=[lock.handle],
    )

"""The run folder: run.json (state, written whole), events.jsonl, log.txt, and the run's files."""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import InputError, RunError
from stillroom.files import FileLock, file_sha256, write_json
from stillroom.lineage import now
from stillroom.lines import read_lines
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 letters, none that look alike
_ID_LENGTH = 26  # 130 random bits


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a phase is; `eta_s` is None until a rate is known."""

    phase: str
    done: int
    total: int
    unit: str
    eta_s: float | None


class RunFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run failed, and what to do."""

    problem: str
    fix: str


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """All of run.json."""

    run_id: str
    kind: RunKind
    status: RunStatus
    created_at: str
    started_at: str | None = None
    ended_at: str | None = None
    pid: int | None = None
    pid_started_at: float | None = None
    """Seconds since the epoch; with the pid it names one process for good."""
    progress: Progress | None = None
    metrics: dict[str, float | None] = {}
    """The latest values; None where one was not finite."""
    alarms: list[str] = []
    """What is wrong now, and what to change."""
    result: dict[str, Any] | None = None
    error: RunFailure | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """When a run that was asked for beside others begins."""

    after: Sequence[str]
    """The runs that it waits for, however they end."""
    files: dict[str, str]
    """Path → SHA-256 of what must not change meanwhile."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All of request.json: what the worker is to do."""

    kind: RunKind
    workspace: str
    request: dict[str, Any]
    turn: Turn | None = None


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log.txt"
        self.events = path / "events.jsonl"
        self.cancel_mark = path / "cancel"

    @property
    def run_id(self) -> str:
        """The run's id is the folder's name."""
        return self.path.name

    def owner_lock(self) -> FileLock:
        """Returns the lock that the run's process holds as long as it lives."""
        return FileLock(self.path / "owner.lock")

    def read(self) -> RunState:
        """Returns the state as it was last written."""
        return msgspec.json.decode((self.path / "run.json").read_bytes(), type=RunState)

    def write(self, state: RunState, *, durable: bool = True) -> None:
        """Replaces the state; only the run's owner may."""
        write_json(self.path / "run.json", state, durable=durable)

    def read_request(self) -> RunRequest:
        """Returns what the run was asked to do."""
        return msgspec.json.decode((self.path / "request.json").read_bytes(), type=RunRequest)

    def read_events(self) -> Iterator[dict[str, Any]]:
        """Yields the events in order; a line that is being written is left out."""
        if self.events.exists():
            for line in read_lines(self.events):
                try:
                    yield msgspec.json.decode(line.data)
                except msgspec.DecodeError:
                    return


def create_run(
    workspace: Workspace, kind: RunKind, request: dict[str, Any], *, turn: Turn | None = None
) -> RunFolder:
    """Creates the folder of a new run, whose state is `starting`."""
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
    folder = RunFolder(workspace.runs / f"{kind}-{suffix}")
    folder.path.mkdir(parents=True)
    asked = RunRequest(kind=kind, workspace=str(workspace.root), request=request, turn=turn)
    write_json(folder.path / "request.json", asked)
    folder.write(
        RunState(run_id=folder.run_id, kind=kind, status=RunStatus.STARTING, created_at=now())
    )
    return folder


def hashes_of(files: Sequence[Path]) -> dict[str, str]:
    """Returns the SHA-256 of each file by its path, as a `Turn` keeps it."""
    return {str(file): file_sha256(file) for file in files}


def find_run(workspace: Workspace, run_id: str) -> RunFolder:
    """Returns the run with this id, or with an id that alone begins so. Raises RunError."""
    if not run_id or "/" in run_id or run_id.startswith("."):
        raise InputError(f"{run_id!r} is not a run id", "list the runs with `stillroom list-runs`")
    exact = RunFolder(workspace.runs / run_id)
    if (exact.path / "run.json").is_file():
        return exact
    matches = [folder for folder in all_runs(workspace) if folder.run_id.startswith(run_id)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(folder.run_id for folder in matches[:4])
        raise RunError(f"{run_id!r} may be several runs: {ids}", "give more of the id")
    raise RunError(
        f"there is no run {run_id!r} in {workspace.runs}",
        "list the runs with `stillroom list-runs` (tool list_runs)",
    )


def all_runs(workspace: Workspace) -> list[RunFolder]:
    """Returns every run of the workspace, in no particular order."""
    if not workspace.runs.is_dir():
        return []
    return [RunFolder(p) for p in workspace.runs.iterdir() if (p / "run.json").is_file()]

"""The folder of a run: the types of run.json, request.json and events.jsonl, and their readers.

All code that reads a run's files uses these types, so each field is declared once.
"""

import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from stillroom.errors import DataError, InputError, RunError
from stillroom.files import FileLock, content_hash, read_json, write_atomic, write_json
from stillroom.home_paths import local_path
from stillroom.lineage import folder_files, now, seconds_between
from stillroom.lines import read_lines
from stillroom.places import make_folder, open_real
from stillroom.settings import Workspace
from stillroom.types import OthersText, OwnText, RunKind, RunStatus

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 letters, none that look alike
_ID_LENGTH = 26  # 130 random bits
REMOTE_FILE = "remote.json"
"""The file in the folder of a run whose process is on another machine (`remote/records.py`)."""
VIEW_FILE = "remote_view.json"
"""The file in a remote run's folder with the last contact to the machine and the cost."""
MIRROR_FILE, MIRRORED_FILE, JOB_FILE = "remote_mirror.json", "remote_files.json", "remote_job.json"
"""The files in a remote run's folder that record what was copied back to this machine."""
FOLLOWER_FILE, FOLLOWER_LOCK, FOLLOWER_LOG = "follower.json", "follower.lock", "follower.log"
"""The settings with which a remote run's follower is restarted, its lock, and its log."""
LIMITS_FILE = "limits.json"
"""The file with the limits at which a run stops by itself (`teachers/run_limits.py`)."""
STATE_FILE, REQUEST_FILE, OWNER_LOCK = "run.json", "request.json", "owner.lock"
LAUNCH_FILE, END_FILE = "launch.json", "ended.json"
CANCEL_MARK, KILL_MARK = "cancel", "cancel_kill"
"""The files that ask a run to stop, and that ask for a run on another machine to be killed."""
_UNREADABLE_FIX = (
    "move the run's folder elsewhere, and start the run again if you need it; the folder's other "
    "files are still readable"
)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a phase: `done` of `total` units; `eta_s` is None until a rate is known."""

    phase: str
    done: int
    total: int
    unit: str
    eta_s: float | None


class RunFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a run failed, and what the user can do about it."""

    problem: OthersText
    fix: OwnText


class ProcessEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ended.json: how a run's process ended without recording its own end."""

    exit_code: int | None = None
    signal: int | None = None
    """The number of the signal that killed it."""
    memory_bytes: int = 0
    """The peak memory of the process."""
    out_of_memory: bool = False
    """Whether it was killed while the kernel's out-of-memory killer was active."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json."""

    run_id: str
    kind: RunKind
    status: RunStatus
    created_at: str
    started_at: str | None = None
    ended_at: str | None = None
    pid: int | None = None
    process_start: str | None = None
    """A text that identifies the process together with its pid (`processes.process_start`)."""
    progress: Progress | None = None
    metrics: dict[str, float | None] = {}
    """The latest value of each metric; None where it was not finite."""
    alarms: list[str] = []
    """The current problems of the run, each with its remedy."""
    notes: list[str] = []
    """The run's first notes to the user; all of them are in events.jsonl."""
    result: dict[str, Any] | None = None
    error: RunFailure | None = None

    @property
    def seconds(self) -> float | None:
        """How long the run's process has been running, in seconds; None if it has not started.

        On another machine, installation and transfers are not counted.
        """
        if self.started_at is None:
            return None
        return seconds_between(self.started_at, self.ended_at or now())

    @property
    def calls_usd(self) -> float:
        """The cost of the run's calls in US dollars, including calls that may still be billed.

        A dry run costs nothing: `cost_usd` in its result is an estimate, with a low and a high end.
        """
        result = self.result or {}
        recorded = [result.get("cost_usd"), self.metrics.get("cost_usd")]
        usd = max((cost for cost in recorded if isinstance(cost, int | float)), default=0.0)
        return usd + (result.get("unconfirmed_usd") or 0.0)


def final_progress(progress: Progress | None, *, is_complete: bool = False) -> Progress | None:
    """Returns the final progress of a run that has ended, without an ETA.

    With `is_complete`, the run has done all its work, even if it stopped before the total.
    """
    if progress is None:
        return None
    total = progress.done if is_complete else progress.total
    return msgspec.structs.replace(progress, total=total, eta_s=None)


class StartAfter(msgspec.Struct, frozen=True, kw_only=True):
    """The condition under which a queued run starts its work."""

    after: Sequence[str]
    """The ids of the runs that must have ended first, whether or not they succeeded."""


class FixedInput(msgspec.Struct, frozen=True, kw_only=True):
    """A file or model folder that a run reads, with its state when the run was started."""

    path: str
    stamp: str
    """A hash of the size and modification time of the file, or of the files in the folder.

    A call that starts a run must return immediately, but hashing 200,000 rows or a model takes
    longer, and a copy would need disk space. The run's process hashes the content that
    it reads; the stamp shows whether the files have changed since the call. Inode numbers are left
    out, since they can differ between machines that share a disk.
    """


class WorkspaceShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the workspace's budget means for a run's `budget_usd`, all in US dollars."""

    earlier_usd: float = 0.0
    """The part of `budget_usd` that earlier runs had spent on the same output."""
    lowered_by_usd: float | None = None
    """The workspace's budget, if it lowered `budget_usd`."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of request.json: the request that the run's process executes."""

    kind: RunKind
    workspace: str
    request: dict[str, Any]
    start_after: StartAfter | None = msgspec.field(default=None, name="turn")
    inputs: Sequence[FixedInput] = ()
    share: WorkspaceShare | None = None
    """None if the workspace had no budget when the run was started, or the run costs nothing."""

    @property
    def earlier_usd(self) -> float:
        """The part of `budget_usd` that was spent before the run; 0 if that is not recorded."""
        return self.share.earlier_usd if self.share is not None else 0.0

    @property
    def display_name(self) -> str | None:
        """The name of the run, or else its output, config file or model; None if it has none."""
        values = (self.request.get(field) for field in ("name", "output", "config", "model"))
        return next((name for name in values if isinstance(name, str)), None)


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of events.jsonl: `metrics` has a step and values, `note` and `alarm` have a text."""

    time: str = ""
    event: str
    step: int | None = None
    values: dict[str, float | None] | None = None
    """The values of the metrics by name; None for a value that is not finite."""
    text: str | None = None


Phase = Literal[
    "waiting", "bringing_up", "preparing", "sending", "running", "bringing_back", "over"
]
"""The phase of a remote run."""


class RemoteView(msgspec.Struct, frozen=True, kw_only=True):
    """The content of remote_view.json: the phase, last contact and machine cost of a remote run."""

    where: str
    """The machine's name in machines.yml."""
    phase: Phase = "waiting"
    last_contact: str | None = None
    """The time when the machine answered last; None if it never has."""
    problem: str | None = None
    """Why the machine cannot be reached at the moment, and what to do; None if it can."""
    machine_usd: float | None = None
    """The cost of the machine so far, up to the run's end; None without a price."""
    release_usd: float | None = None
    """The cost of a rented machine from the run's end to its release; None before the end, without
    a price, and for a machine of the user's own."""
    seconds_used: float = msgspec.field(name="seconds_there", default=0.0)
    """How long the machine has been used, by its own monotonic clock if known."""
    has_started: bool = False
    """Whether the launch was requested; from then on only the machine knows the run's state."""
    budget_usd: float | None = None
    """The budget for the machine and the teacher together, which is read from remote.json."""

    @property
    def spent_usd(self) -> float | None:
        """The cost of the machine, including its release, in US dollars; None without a price."""
        return None if self.machine_usd is None else self.machine_usd + (self.release_usd or 0.0)


class _MachineName(msgspec.Struct, frozen=True):
    """The name of a machine."""

    name: str


class _JobSpec(msgspec.Struct, frozen=True):
    """The part of remote.json that is shown to users."""

    machine: _MachineName
    budget_usd: float | None = None


class RunFolder:
    """The folder of one run, and the paths of the files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_file = path / STATE_FILE
        self.request_file = path / REQUEST_FILE
        self.events = path / "events.jsonl"
        self.log = path / "log.txt"
        self.cancel_mark = path / CANCEL_MARK

    @property
    def run_id(self) -> str:
        """The id of the run, which is the name of the folder."""
        return self.path.name

    def owner_lock(self) -> FileLock:
        """Returns the lock that the run's process holds while it is alive."""
        return FileLock(self.path / OWNER_LOCK)

    @property
    def is_remote(self) -> bool:
        """Whether the run is on another machine, from which its follower copies the state."""
        return (self.path / REMOTE_FILE).exists()

    @property
    def is_run(self) -> bool:
        """Whether the folder has a run.json; its content is not checked."""
        return self.state_file.is_file()

    def read(self) -> RunState:
        """Returns the current state.

        Raises DataError if run.json is damaged, and OSError if it is missing.
        """
        return read_json(self.state_file, RunState, fix=_UNREADABLE_FIX)

    def write(self, state: RunState, *, durable: bool = True) -> None:
        """Replaces the state. Only the process that owns the run may call this."""
        write_json(self.state_file, state, durable=durable)

    def read_request(self) -> RunRequest:
        """Returns the request that the run was started with.

        Raises DataError if request.json is damaged, and OSError if it is missing.
        """
        return read_json(self.request_file, RunRequest, fix=_UNREADABLE_FIX)

    def try_read_request(self) -> RunRequest | None:
        """Returns the request that the run was started with; None if it cannot be read."""
        with suppress(DataError, OSError):
            return self.read_request()
        return None

    def limit_usd(self, budget_usd: float | None, spent_usd: float) -> float:
        """Returns a run's budget in US dollars, which includes earlier runs; infinite without one.

        spent_usd: what its output has cost so far. If that is less than when the run was started,
        because the output was deleted, the budget is lowered by the difference: the run may add no
        more than the workspace's budget allowed.
        """
        recorded = self.try_read_request()
        earlier_usd = recorded.earlier_usd if recorded is not None else 0.0
        return (budget_usd or math.inf) - max(0.0, earlier_usd - spent_usd)

    def earlier_runs(self) -> Iterator["RunFolder"]:
        """Yields the chain of resumed runs: the run that this run resumed comes first."""
        run, seen = self, {self.run_id}
        while (run_request := run.try_read_request()) is not None:
            earlier = run_request.request.get("resume")
            if not isinstance(earlier, str) or earlier in seen:
                return
            seen.add(earlier)
            run = RunFolder(run.path.parent / earlier)
            yield run

    def read_process_end(self) -> ProcessEnd | None:
        """Returns how the run's process ended, or None if that was not recorded."""
        try:
            return read_json(self.path / END_FILE, ProcessEnd)
        except (FileNotFoundError, DataError):
            return None

    def ask_to_cancel(self) -> None:
        """Asks the run to stop, recording the time (monotonic) of the request."""
        with suppress(FileExistsError):
            mark = open_real(self.cancel_mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(mark, "w", encoding="ascii") as stream:
                stream.write(f"{time.monotonic()}\n")

    def seconds_since_cancel(self) -> float | None:
        """Returns the seconds since the run was first asked to stop; None if it was not."""
        try:
            recorded_time = self.cancel_mark.read_text(encoding="ascii", errors="replace")
            file_time = self.cancel_mark.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            return max(0.0, time.monotonic() - float(recorded_time))
        except ValueError:
            # The file was created by hand, or the disk was full.
            return max(0.0, time.time() - file_time)

    def check_inputs(self) -> None:
        """Raises RunError if a file has changed since the run was started.

        Called before and after a run reads its files, it ensures that the run has read the files
        as they were when it was started. A shard of a run has no request.json and is not checked.
        """
        inputs = self.read_request().inputs if self.request_file.exists() else ()
        for fixed in inputs:
            if _stamp(local_path(fixed.path)) != fixed.stamp:
                raise RunError(
                    f"{fixed.path} has changed since this run was started",
                    "start it again: the new run reads the changed file",
                )

    def read_events(self) -> Iterator[RunEvent]:
        """Yields the events in order; unreadable lines are skipped."""
        if not self.events.exists():
            return
        decoder = msgspec.json.Decoder(RunEvent)
        for line in read_lines(self.events):
            # The last line may be incomplete, while it is written or after a crash.
            with suppress(ValueError, RecursionError):
                yield decoder.decode(line.data)

    def read_metrics(self) -> Iterator[tuple[int, dict[str, float | None]]]:
        """Yields the number and the metrics of each recorded step."""
        for event in self.read_events():
            if event.event == "metrics":
                yield event.step or 0, event.values or {}


@dataclass(frozen=True, slots=True)
class NewRun:
    """What a new run starts with in addition to its request."""

    start_after: StartAfter | None = None
    """The runs that it waits for; None if it starts immediately."""
    inputs: Sequence[Path] = ()
    """The files and folders that it reads, whose current state is recorded."""
    run_files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The contents of the files to write to its folder, by name."""
    notes: Sequence[str] = ()
    """Its first notes to the user."""
    share: WorkspaceShare | None = None
    """Its share of the workspace's budget; None if it has none."""


def create_run(
    workspace: Workspace, kind: RunKind, request: dict[str, Any], new: NewRun | None = None
) -> RunFolder:
    """Creates the folder of a new run in the state `starting`."""
    new = new or NewRun()
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
    folder = RunFolder(workspace.runs / f"{kind}-{suffix}")
    make_folder(folder.path)
    for name, data in new.run_files.items():
        write_atomic(folder.path / name, data)
    run_request = RunRequest(
        kind=kind,
        workspace=str(workspace.root),
        request=request,
        start_after=new.start_after,
        inputs=fixed_inputs(new.inputs),
        share=new.share,
    )
    write_json(folder.request_file, run_request)
    state = RunState(
        run_id=folder.run_id,
        kind=kind,
        status=RunStatus.STARTING,
        created_at=now(),
        notes=list(new.notes),
    )
    folder.write(state)
    return folder


def read_remote_state(folder: Path) -> RemoteView | None:
    """Returns the state of a run on another machine; None for a run on this machine."""
    if not (folder / REMOTE_FILE).is_file():
        return None
    spec = _JobSpec(_MachineName("an unknown machine (remote.json is unreadable)"))
    with suppress(OSError, DataError):
        spec = read_json(folder / REMOTE_FILE, _JobSpec)
    view = RemoteView(where=spec.machine.name)
    with suppress(OSError, DataError):
        view = read_json(folder / VIEW_FILE, RemoteView)
    return msgspec.structs.replace(view, budget_usd=spec.budget_usd)


def fixed_inputs(paths: Sequence[Path]) -> list[FixedInput]:
    """Returns the files and model folders that a run reads, with their current state."""
    return [FixedInput(path=str(path), stamp=_stamp(path)) for path in dict.fromkeys(paths)]


def given_config(config: Path) -> str:
    """Returns the name of a run's own copy of config.yml, which later edits do not affect."""
    return f"given_config{config.suffix}"


def _stamp(path: Path) -> str:
    """Returns the stamp of a file, or of the files that `folder_files` lists for a folder."""
    files = folder_files(path) if path.is_dir() else [path]
    with suppress(FileNotFoundError):
        stats = [(file.relative_to(path).as_posix(), file.stat()) for file in files]
        return content_hash([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return "gone"


def find_run(workspace: Workspace, run_id: str) -> RunFolder:
    """Returns the run whose id is `run_id`, or the only run whose id begins with it.

    Raises RunError if there is no or more than one such run, and InputError for an invalid id.
    """
    if not run_id or "/" in run_id or run_id.startswith("."):
        raise InputError(f"{run_id!r} is not a run id", "list the runs with `stillroom list-runs`")
    exact = RunFolder(workspace.runs / run_id)
    if exact.is_run:
        return exact
    matches = [folder for folder in all_runs(workspace) if folder.run_id.startswith(run_id)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(folder.run_id for folder in matches[:4])
        raise RunError(f"{run_id!r} matches several runs: {ids}", "give more characters of the id")
    raise RunError(
        f"there is no run {run_id!r} in {workspace.runs}",
        "list the runs with `stillroom list-runs` (tool list_runs)",
    )


def all_runs(workspace: Workspace) -> list[RunFolder]:
    """Returns every run of the workspace, in no particular order."""
    if not workspace.runs.is_dir():
        return []
    return [folder for path in workspace.runs.iterdir() if (folder := RunFolder(path)).is_run]

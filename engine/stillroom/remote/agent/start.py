"""Starts a run's detached process on this machine, once, however often that is wished for."""

import os
import time
from pathlib import Path

import msgspec

import stillroom
from stillroom.errors import EngineError
from stillroom.files import FileLock, write_atomic, write_json
from stillroom.home_paths import as_found, home_variable
from stillroom.jobs.supervise import launch_run
from stillroom.lineage import now
from stillroom.remote.agent.agent_run import AgentRun, StartRecord, agent_run
from stillroom.remote.agent.folders import AgentFolder
from stillroom.remote.agent.store import place_file, stored
from stillroom.remote.records import LaunchRequest
from stillroom.remote.run_files import is_safe
from stillroom.run_folder import LIMITS_FILE, RunRequest, RunState, fixed_inputs
from stillroom.secrecy.environments import PIPED_VARIABLES, run_environment
from stillroom.teachers.run_limits import RunLimits
from stillroom.types import RunStatus

_PACKAGE = "package:"
_LOCK_WAIT_S = 60.0
_POLL_S = 0.1


def start_run(there: AgentFolder) -> None:
    """The command `start`: starts the run of a `LaunchRequest`, unless it was started before."""
    run = there.receive(LaunchRequest)
    if run is not None:
        start(there, run)


def start(there: AgentFolder, run: LaunchRequest) -> None:
    """Starts a run, unless it was started before.

    A start that was killed on its way is finished by the next one. The run's processes inherit a
    lock from it, so that no second process is started while one lives.
    """
    place = agent_run(there, run.run_id)
    place.base.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock, keeper = place.start_lock(), place.keeper_lock()
    _wait_for(lock, run.run_id)
    try:
        if keeper.try_acquire() and not _has_begun(place):
            _launch(there, place, run, keeper)
    finally:
        keeper.release()
        lock.release()


def _wait_for(lock: FileLock, run_id: str) -> None:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not lock.try_acquire():
        if time.monotonic() > deadline:
            raise EngineError(
                f"another connection has been starting {run_id} for a minute",
                "it is tried again; look for a process that hangs on that machine",
            )
        time.sleep(_POLL_S)


def _has_begun(place: AgentRun) -> bool:
    """Returns whether the run's process has ever begun its work; none lives any more."""
    return place.folder.is_run and place.folder.read().status is not RunStatus.STARTING


def _launch(there: AgentFolder, place: AgentRun, run: LaunchRequest, keeper: FileLock) -> None:
    started = StartRecord(
        started=time.monotonic(), outputs=run.outputs, placed=_lay_out(there, place, run)
    )
    variable = home_variable(_pairs(place, run))
    os.environ.update(variable)
    _write_folder(place, run, started.started)
    write_json(place.start_file, started)
    launch_run(
        place.folder,
        place.workspace,
        environment=run_environment(place.workspace)
        | variable
        | {PIPED_VARIABLES: ",".join(run.variables)},
        secrets=run.secrets,
        kept_open=[keeper.handle],
    )


def _lay_out(there: AgentFolder, place: AgentRun, run: LaunchRequest) -> dict[str, str]:
    """Puts the sent files where the run looks for them; returns the hashes of the workspace's."""
    place.workspace.mkdir(mode=0o700, exist_ok=True)
    placed: dict[str, str] = {}
    for file in run.files:
        if not is_safe(file.place) or file.place.partition("/")[0] not in ("workspace", "outside"):
            raise EngineError(f"no file of a run lies at {file.place!r}", "update stillroom here")
        if not stored(there, file.sha256).exists():
            raise EngineError(
                f"the content of {file.place} is not here any more", "it is sent once more"
            )
        target = place.base / file.place
        target.unlink(missing_ok=True)
        place_file(there, file.sha256, target, is_executable=file.is_executable)
        first, _, path = file.place.partition("/")
        if first == "workspace":
            placed[path] = file.sha256
    return placed


def _pairs(place: AgentRun, run: LaunchRequest) -> list[tuple[str, str]]:
    """Returns the paths at home, each with the one here that stands for it."""
    pairs = [(path.home, _here(place, path.home, path.place)) for path in run.home_paths]
    return [*pairs, (run.home_root, str(place.workspace))]


def _here(place: AgentRun, home: str, path: str) -> str:
    if path.startswith(_PACKAGE):
        return str(Path(stillroom.__file__).resolve().parent / path.removeprefix(_PACKAGE))
    # `~` stands for the user's own folder, which is at home.
    return path if home == "~" else str(place.base / path)


def _write_folder(place: AgentRun, run: LaunchRequest, started: float) -> None:
    """Writes the run's folder as `create_run` does; run.json, with which it is a run, last."""
    folder = place.folder
    for name, data in run.copies.items():
        write_atomic(folder.path / name, data)
    write_json(folder.path / LIMITS_FILE, _limits(run, started))
    request = msgspec.json.decode(run.request, type=RunRequest)
    request = msgspec.structs.replace(
        request,
        workspace=str(place.workspace),
        inputs=fixed_inputs([as_found(fixed.path) for fixed in request.inputs]),
        start_after=None,  # They ran at home, and have ended.
    )
    write_json(folder.request_file, request)
    state = RunState(
        run_id=run.run_id,
        kind=request.kind,
        status=RunStatus.STARTING,
        created_at=now(),
        notes=run.notes,
    )
    folder.write(state)


def _limits(run: LaunchRequest, started: float) -> RunLimits:
    return RunLimits(
        started=started,
        hours=run.max_hours,
        budget_usd=run.budget_usd,
        price_per_hour=run.price_per_hour,
        spent_usd=run.spent_usd,
        reserve_s=run.reserve_s,
    )

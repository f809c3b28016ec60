"""Starts a run's detached process on this machine, cancels it, and deletes its folder."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec

import stillroom
from stillroom.errors import EngineError
from stillroom.files import FileLock, write_atomic, write_json
from stillroom.home_paths import home_variable, local_path
from stillroom.jobs.supervise import cancel_run, kill_run, launch_run
from stillroom.lineage import now
from stillroom.models.gguf.folder import CACHE_VARIABLE
from stillroom.remote.agent.runs import AgentRun, StartRecord, agent_run
from stillroom.remote.agent.store import AgentFolder, blob_file, place_file
from stillroom.remote.host import MachineGoneError
from stillroom.remote.records import PACKAGE_PREFIX, CancelRequest, LaunchRequest
from stillroom.remote.run_files import is_safe
from stillroom.run_folder import LIMITS_FILE, RunRequest, RunState, fixed_inputs
from stillroom.secrecy.environments import PIPED_VARIABLES, run_environment
from stillroom.teachers.run_limits import RunLimits
from stillroom.types import RunStatus

_LOCK_WAIT_S = 60.0


def start(agent: AgentFolder, request: LaunchRequest) -> None:
    """The command `start`: starts a run, unless it was started before.

    A start that was killed halfway is completed by the next one. The run's processes inherit a
    lock, so that no second process is started while one lives.
    """
    run = agent_run(agent, request.run_id)
    run.base.mkdir(mode=0o700, parents=True, exist_ok=True)
    start_lock, keeper_lock = run.start_lock(), run.keeper_lock()
    if not start_lock.acquire_within(_LOCK_WAIT_S):
        raise EngineError(
            f"another connection has been starting {run.run_id} for {_LOCK_WAIT_S:.0f} s",
            "no action needed: Stillroom retries; if the error persists, look for a hanging "
            "process on that machine",
        )
    try:
        if keeper_lock.try_acquire() and not _has_begun(run):
            _launch(agent, run, request, keeper_lock)
    finally:
        keeper_lock.release()
        start_lock.release()


def cancel(agent: AgentFolder, request: CancelRequest) -> None:
    """The command `cancel`: asks a run to stop, or kills its processes.

    Raises MachineGoneError if this machine has no such run.
    """
    folder = agent_run(agent, request.run_id).folder
    if not folder.is_run:
        raise MachineGoneError(
            f"there is no run {request.run_id!r} on this machine",
            "no action needed: there is no process to stop",
        )
    if request.kill:
        kill_run(folder)
    elif folder.seconds_since_cancel() is None:
        cancel_run(folder)


def remove(agent: AgentFolder, run_id: str) -> None:
    """The command `remove`: kills a run's remaining processes and deletes its folder."""
    run = agent_run(agent, run_id)
    if run.folder.is_run:
        kill_run(run.folder)
    # Renamed first, so that a partially deleted folder is not mistaken for a run.
    with suppress(FileNotFoundError):
        run.base.rename(run.base.with_name(f".{run_id}.{os.getpid()}.going"))
    # Includes leftovers of an earlier call whose connection was lost.
    for leftover in run.base.parent.glob(f".{run_id}.*.going"):
        shutil.rmtree(leftover, ignore_errors=True)


def _has_begun(run: AgentRun) -> bool:
    """Returns whether the run's process has begun its work, even if it has ended since."""
    return run.folder.is_run and run.folder.read().status is not RunStatus.STARTING


def _launch(agent: AgentFolder, run: AgentRun, request: LaunchRequest, lock: FileLock) -> None:
    """Places the run's files, writes its folder, and starts its process.

    The process inherits the lock.
    """
    start_record = StartRecord(
        started_at=time.monotonic(),
        outputs=request.outputs,
        placed=_place_files(agent, run, request),
    )
    variable = home_variable(_path_pairs(run, request))
    # `_write_folder` uses it to map the paths of the request, as the run's process will.
    os.environ.update(variable)
    _write_folder(run, request, start_record.started_at)
    write_json(run.start_file, start_record)
    launch_run(
        run.folder,
        run.workspace,
        environment=run_environment(run.workspace)
        | variable
        | {CACHE_VARIABLE: str(agent.cache)}
        | {PIPED_VARIABLES: ",".join(request.variables)},
        secrets=request.secrets,
        inherited_fds=[lock.handle],
    )


def _place_files(agent: AgentFolder, run: AgentRun, request: LaunchRequest) -> dict[str, str]:
    """Places the uploaded files; returns the hashes of those in the workspace, by path."""
    run.workspace.mkdir(mode=0o700, exist_ok=True)
    placed: dict[str, str] = {}
    for file in request.files:
        folder, _, path = file.remote_path.partition("/")
        if not is_safe(file.remote_path) or folder not in ("workspace", "outside"):
            raise EngineError(
                f"the launch request has the path {file.remote_path!r}, which is in neither "
                "workspace/ nor outside/",
                "the two machines' versions of stillroom may differ: update stillroom where you "
                "started the run, and start it again",
            )
        if not blob_file(agent, file.sha256).exists():
            raise EngineError(
                f"the content of {file.remote_path} is no longer on this machine",
                "no action needed: it is uploaded again",
            )
        target = run.base / file.remote_path
        target.unlink(missing_ok=True)
        place_file(agent, file.sha256, target, is_executable=file.is_executable)
        if folder == "workspace":
            placed[path] = file.sha256
    return placed


def _path_pairs(run: AgentRun, request: LaunchRequest) -> list[tuple[str, str]]:
    """Returns pairs of a path on the user's machine and its counterpart on this machine."""
    pairs = [
        (path.home_path, _path_on_machine(run, path.home_path, path.remote_path))
        for path in request.home_paths
    ]
    return [*pairs, (request.home_root, str(run.workspace))]


def _path_on_machine(run: AgentRun, home_path: str, remote_path: str) -> str:
    """Returns the path on this machine that replaces a home path."""
    if remote_path.startswith(PACKAGE_PREFIX):
        return str(
            Path(stillroom.__file__).resolve().parent / remote_path.removeprefix(PACKAGE_PREFIX)
        )
    # `~` is the user's home folder on the user's machine.
    return remote_path if home_path == "~" else str(run.base / remote_path)


def _write_folder(run: AgentRun, launch: LaunchRequest, started_at: float) -> None:
    """Writes the run's folder as `create_run` does; run.json, which marks it as a run, last."""
    folder = run.folder
    for name, data in launch.run_files.items():
        write_atomic(folder.path / name, data)
    limits = RunLimits(
        started=started_at,
        hours=launch.max_hours,
        budget_usd=launch.budget_usd,
        price_per_hour=launch.price_per_hour,
        spent_usd=launch.spent_usd,
        reserve_s=launch.reserve_s,
    )
    write_json(folder.path / LIMITS_FILE, limits)
    request = msgspec.json.decode(launch.request, type=RunRequest)
    request = msgspec.structs.replace(
        request,
        workspace=str(run.workspace),
        inputs=fixed_inputs([local_path(fixed.path) for fixed in request.inputs]),
        start_after=None,  # Those runs were local and have ended.
    )
    write_json(folder.request_file, request)
    state = RunState(
        run_id=run.run_id,
        kind=request.kind,
        status=RunStatus.STARTING,
        created_at=now(),
        notes=launch.notes,
    )
    folder.write(state)

"""Decides where an operation runs: on this machine, or on a machine of machines.yml."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from stillroom.api.spending import cost_of, limit_budget
from stillroom.errors import DataError, InputError, RunError
from stillroom.files import read_json
from stillroom.outputs import OutputHeldError
from stillroom.projects.setup import CheckSetup, SetupReport
from stillroom.projects.setup import check_setup as check_this_machine
from stillroom.remote.bundle.checks import check_remote_needs, check_remote_request, min_budget_usd
from stillroom.remote.bundle.job_spec import PackedJob, pack
from stillroom.remote.bundle.needs import Needs
from stillroom.remote.known_machines import remote_runs
from stillroom.remote.machine import Machine, RayCluster
from stillroom.remote.machine_checks import check_machine
from stillroom.remote.machines import find_machine
from stillroom.remote.records import JobSpec
from stillroom.rollout.request import GenerateRollouts
from stillroom.run_folder import REMOTE_FILE, NewRun, RunFolder, all_runs, read_remote_state
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining
from stillroom.validation import PlacedRequest

_Request = TypeVar("_Request", bound=PlacedRequest)


def resolve_machine(workspace: Workspace, request: _Request) -> tuple[_Request, Machine | None]:
    """Returns the request and the machine that will run it; None means this machine.

    A Ray cluster becomes an option of the request, which then runs on this machine. Raises
    EngineError if the machine is unknown, or cannot do what is requested.
    """
    if request.where is None:
        if isinstance(request, StartTraining) and request.budget_usd is not None:
            raise InputError(
                "budget_usd limits the cost of a remote machine, but training on this machine is "
                "free",
                "leave out budget_usd, or set where to a machine",
            )
        return request, None
    machine = find_machine(workspace, request.where)
    if machine.ray is not None:
        return _with_ray_cluster(request, machine.name, machine.ray), None
    check_remote_request(request, machine)
    return request, machine


def _with_ray_cluster(request: _Request, name: str, cluster: RayCluster) -> _Request:
    """Returns the request with a Ray cluster in its options, in place of `where`.

    Raises InputError if Ray cannot do what is requested.
    """
    changes: dict[str, object] = {"where": None}
    if isinstance(request, GenerateRollouts):
        if request.ray_address is not None:
            raise InputError(
                f"ray_address and where: {name} both name a Ray cluster", "set only one of the two"
            )
        changes["ray_address"] = cluster.address
        if cluster.workers is not None and "ray_workers" not in request.model_fields_set:
            changes["ray_workers"] = cluster.workers
    elif isinstance(request, StartTraining):
        if request.budget_usd is not None:
            raise InputError(
                f"budget_usd limits the cost of a machine, but {name} is a Ray cluster, which "
                "stillroom cannot stop",
                "leave out budget_usd, or name a machine with ssh access",
            )
        changes["overrides"] = (*request.overrides, *_launcher_overrides(request, cluster))
    else:
        raise InputError(
            f"{name} is a Ray cluster, which supports only generate_rollouts and start_training",
            "name a machine with ssh access, or leave out where",
        )
    fields = {field: getattr(request, field) for field in request.model_fields_set}
    return type(request).model_validate({**fields, **changes})


def _launcher_overrides(request: StartTraining, cluster: RayCluster) -> Iterator[str]:
    """Yields the overrides that run a training on a cluster."""
    yield "launcher.kind=ray"
    yield f"launcher.address={cluster.address}"
    is_set = any(override.startswith("launcher.num_processes=") for override in request.overrides)
    if cluster.workers is not None and not is_set:
        yield f"launcher.num_processes={cluster.workers}"


def pack_job(
    workspace: Workspace,
    machine: Machine | None,
    needs: Callable[[], Needs],
    *,
    budget_usd: float | None = None,
    num_runs: int = 1,
) -> PackedJob | None:
    """Returns the job for a run's machine; None if the run is on this machine.

    num_runs: the number of runs of this call that share the remaining budget.
    Raises InputError if the run needs something that only this machine has, or if the budget of
    the machine or of the workspace is spent.
    """
    if machine is None:
        return None
    needed = needs()
    check_remote_needs(needed, machine)
    budget_usd, notes = _limit_to_machine_budget(workspace, machine, budget_usd, num_runs)
    if machine.access.is_provisioned or machine.price_per_hour:
        budget_usd, more_notes = limit_budget(workspace, budget_usd, num_runs=num_runs)
        notes += more_notes
    job = pack(workspace, machine, needed, budget_usd=budget_usd)
    return replace(job, notes=[*notes, *job.notes])


def _limit_to_machine_budget(
    workspace: Workspace, machine: Machine, budget_usd: float | None, num_runs: int
) -> tuple[float | None, list[str]]:
    """Returns a run's budget, limited by its machine's budget, and a note if that lowered it.

    An active run counts with its full budget.
    """
    if machine.budget_usd is None:
        return budget_usd, []
    spent = 0.0
    for run, job, _ in remote_runs(workspace):
        if job.machine.name == machine.name:
            spent += cost_of(run)
    remaining_usd = (machine.budget_usd - spent) / num_runs
    if remaining_usd <= min_budget_usd(machine):
        raise InputError(
            f"this workspace's runs have used or reserved ${spent:.2f} of the budget_usd of "
            f"${machine.budget_usd:g} that {machine.file} sets for {machine.name}",
            "ask the user to wait until a run on it has ended, or to raise budget_usd in that file",
        )
    if budget_usd is not None and budget_usd <= remaining_usd:
        return budget_usd, []
    note = (
        f"this run may cost up to ${remaining_usd:.2f}, the rest of the budget of "
        f"${machine.budget_usd:g} for {machine.name}"
    )
    return remaining_usd, [note]


def with_budget_left(
    workspace: Workspace, request: StartTraining, machine: Machine
) -> tuple[StartTraining, list[str]]:
    """Returns a resuming request with the rest of the resumed run's budget, and a note.

    A budget that the request sets is kept. Raises InputError if too little is left.
    """
    if request.budget_usd is not None or request.resume is None:
        return request, []
    resumed, spent = RunFolder(workspace.runs / request.resume), 0.0
    for run in chain([resumed], resumed.earlier_runs()):
        if (view := read_remote_state(run.path)) is not None:
            spent += view.spent_usd or 0.0
            if view.budget_usd is not None:
                return _with_remaining_budget(request, machine, view.budget_usd, spent)
    return request, []


def _with_remaining_budget(
    request: StartTraining, machine: Machine, budget_usd: float, spent_usd: float
) -> tuple[StartTraining, list[str]]:
    """Returns the request with the rest of a budget, and a note.

    Raises InputError if too little is left to resume the training.
    """
    remaining_usd = budget_usd - spent_usd
    if remaining_usd <= min_budget_usd(machine):
        raise InputError(
            f"only ${max(0.0, remaining_usd):.4f} is left of the budget of ${budget_usd:g} of "
            f"{request.resume}, too little to resume it",
            "ask the user, then repeat the call with a budget_usd for the remaining work",
        )
    note = (
        f"this run may cost up to ${remaining_usd:.4f}, what is left of {request.resume}'s budget "
        f"of ${budget_usd:g}"
    )
    request = request.model_copy(update={"budget_usd": remaining_usd})
    check_remote_request(request, machine)
    return request, [note]


def with_job(new: NewRun, job: PackedJob | None) -> NewRun:
    """Returns `new` with the files and notes of its job for another machine, if there is one."""
    if job is None:
        return new
    return replace(
        new, run_files={**new.run_files, **job.run_files}, notes=[*new.notes, *job.notes]
    )


def check_not_running_elsewhere(workspace: Workspace, run_id: str) -> None:
    """Raises RunError if a run on another machine has neither ended nor been cancelled.

    A queued cancellation is enough, since the machine may be unreachable for long or forever.
    """
    folder = RunFolder(workspace.runs / run_id)
    if not folder.is_remote or folder.seconds_since_cancel() is not None:
        return
    if not folder.read().status.is_final:
        machine = read_json(folder.path / REMOTE_FILE, JobSpec).machine.name
        raise RunError(
            f"run {run_id!r} may still be running on {machine}, which has not reported its end, so "
            "resuming it could run it twice",
            "wait until it ends (get_run). If the machine is gone for good, call cancel_run first: "
            "this call then resumes from the last downloaded checkpoint, and the "
            f"cancellation is queued until {machine} answers",
        )


def check_not_written_elsewhere(workspace: Workspace, output: Path) -> None:
    """Raises OutputHeldError if a run on another machine is writing the output.

    Such a run does not hold the output's lock on this machine.
    """
    for folder in all_runs(workspace):
        if not folder.is_remote:
            continue
        with suppress(OSError, DataError):
            if folder.read().status.is_final:
                continue
            job = read_json(folder.path / REMOTE_FILE, JobSpec)
            if any(workspace.root / name == output for name in job.outputs):
                raise OutputHeldError(
                    f"{workspace.shown(output)} is being written by {folder.run_id} on "
                    f"{job.machine.name}",
                    f"wait until it ends (get_run), or stop it with `stillroom cancel-run "
                    f"{folder.run_id}`",
                )


def check_setup(workspace: Workspace, request: CheckSetup) -> SetupReport:
    """Checks the setup of this machine, or of the machine `where`.

    What is missing is in the report. Raises ConfigError if machines.yml is malformed, and
    InputError if it has no machine `where`.
    """
    if request.where is None:
        return check_this_machine(workspace, request)
    return check_machine(workspace, request, request.where)

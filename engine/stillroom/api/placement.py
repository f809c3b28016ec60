"""Where an operation is done: on this machine, or on one of machines.yml, which is sent its job."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from stillroom.errors import DataError, InputError, RunError
from stillroom.files import read_json
from stillroom.outputs import OutputHeldError
from stillroom.projects.setup import CheckSetup, SetupReport
from stillroom.projects.setup import check_setup as check_this_machine
from stillroom.remote.bundle.job_spec import PackedJob, pack
from stillroom.remote.bundle.needs import Needs
from stillroom.remote.bundle.refusals import min_budget_usd, refuse_needs, refuse_request
from stillroom.remote.known_machines import remote_runs
from stillroom.remote.machine import Machine, RayCluster
from stillroom.remote.machine_checks import check_machine
from stillroom.remote.machines import find_machine
from stillroom.remote.records import JobSpec
from stillroom.rollout.request import GenerateRollouts
from stillroom.run_folder import REMOTE_FILE, NewRun, RunFolder, all_runs, read_elsewhere
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining
from stillroom.validation import PlacedRequest

_Request = TypeVar("_Request", bound=PlacedRequest)


def placed(workspace: Workspace, request: _Request) -> tuple[_Request, Machine | None]:
    """Returns a request with the machine that does it, None for this one.

    A Ray cluster becomes an option of the request, whose run is then done here.
    Raises an EngineError if the machine is not known, or cannot do what is requested.
    """
    if request.where is None:
        if isinstance(request, StartTraining) and request.budget_usd is not None:
            raise InputError(
                "budget_usd limits what a remote machine costs, and training here costs nothing",
                "leave it out, or name a machine with where",
            )
        return request, None
    machine = find_machine(workspace, request.where)
    if machine.ray is not None:
        return _on_ray(request, machine.name, machine.ray), None
    refuse_request(request, machine)
    return request, machine


def _on_ray(request: _Request, name: str, cluster: RayCluster) -> _Request:
    changes: dict[str, object] = {"where": None}
    if isinstance(request, GenerateRollouts):
        if request.ray_address is not None:
            raise InputError(
                f"ray_address and where: {name} both name a Ray cluster", "leave one of them out"
            )
        changes["ray_address"] = cluster.address
        if cluster.workers is not None and "ray_workers" not in request.model_fields_set:
            changes["ray_workers"] = cluster.workers
    elif isinstance(request, StartTraining):
        if request.budget_usd is not None:
            raise InputError(
                f"budget_usd limits what a machine costs, and {name} is a Ray cluster, which "
                "stillroom does not stop",
                "leave it out, or name a machine that ssh reaches",
            )
        changes["overrides"] = (*request.overrides, *_launcher(request, cluster))
    else:
        raise InputError(
            f"{name} is a Ray cluster, where only generate_rollouts and start_training can run",
            "name a machine that ssh reaches, or leave where out",
        )
    fields = {field: getattr(request, field) for field in request.model_fields_set}
    return type(request).model_validate({**fields, **changes})


def _launcher(request: StartTraining, cluster: RayCluster) -> Iterator[str]:
    """Yields the overrides that send a training to a cluster."""
    yield "launcher.kind=ray"
    yield f"launcher.address={cluster.address}"
    given = any(each.startswith("launcher.num_processes=") for each in request.overrides)
    if cluster.workers is not None and not given:
        yield f"launcher.num_processes={cluster.workers}"


def packed(
    workspace: Workspace,
    machine: Machine | None,
    needs: Callable[[], Needs],
    *,
    budget_usd: float | None = None,
    num_runs: int = 1,
) -> PackedJob | None:
    """Returns what a run's machine is sent; None if it is done here.

    num_runs: how many runs of one call share what the machine's own budget leaves.
    Raises InputError for what only this machine has, and if that budget is spent.
    """
    if machine is None:
        return None
    needed = needs()
    refuse_needs(needed, machine)
    budget_usd, notes = _within_budget(workspace, machine, budget_usd, num_runs)
    job = pack(workspace, machine, needed, budget_usd=budget_usd)
    return replace(job, notes=[*notes, *job.notes])


def _within_budget(
    workspace: Workspace, machine: Machine, budget_usd: float | None, num_runs: int
) -> tuple[float | None, list[str]]:
    """Returns a run's budget within that of its machine, and a note if that one bounds it.

    A run that is not over counts with all that it may still cost.
    """
    if machine.budget_usd is None:
        return budget_usd, []
    spent = 0.0
    for run, spec, view in remote_runs(workspace):
        if spec.machine.name == machine.name:
            cost = run.read().metrics.get("cost_usd") or 0.0
            cost += view.spent_usd if view is not None else 0.0
            is_over = view is not None and view.phase == "over"
            spent += cost if is_over else max(cost, spec.budget_usd or 0.0)
    left = (machine.budget_usd - spent) / num_runs
    if left <= min_budget_usd(machine):
        raise InputError(
            f"of the budget_usd of ${machine.budget_usd:g} that {machine.file} gives "
            f"{machine.name}, this workspace's runs have used or reserved ${spent:.2f}",
            "ask the user: wait until a run on it has ended, or raise budget_usd in that file",
        )
    if budget_usd is not None and budget_usd <= left:
        return budget_usd, []
    note = (
        f"may cost ${left:.2f}: what the budget of ${machine.budget_usd:g} of {machine.name} leaves"
    )
    return left, [note]


def with_budget_left(
    workspace: Workspace, request: StartTraining, machine: Machine
) -> tuple[StartTraining, list[str]]:
    """Returns a training that resumes with what its earlier runs left of their budget, and a note.

    A request that names a budget of its own keeps that. Raises InputError if nothing is left.
    """
    if request.budget_usd is not None or request.resume is None:
        return request, []
    resumed, spent = RunFolder(workspace.runs / request.resume), 0.0
    for run in chain([resumed], resumed.earlier_runs()):
        if (view := read_elsewhere(run.path)) is not None:
            spent += view.spent_usd or 0.0
            if view.budget_usd is not None:
                return _with_rest(request, machine, view.budget_usd, spent)
    return request, []


def _with_rest(
    request: StartTraining, machine: Machine, budget: float, spent: float
) -> tuple[StartTraining, list[str]]:
    left = budget - spent
    if left <= min_budget_usd(machine):
        raise InputError(
            f"${max(0.0, left):.4f} is left of the budget of ${budget:g} that {request.resume} was "
            "started with: too little to resume it",
            "ask the user, then make the same call with a budget_usd for the remaining work",
        )
    note = f"resumes with the ${left:.4f} that is left of the budget of ${budget:g}"
    request = request.model_copy(update={"budget_usd": left})
    refuse_request(request, machine)
    return request, [note]


def with_spec(new: NewRun, spec: PackedJob | None) -> NewRun:
    """Returns what a run begins with, its spec for another machine included."""
    if spec is None:
        return new
    return replace(new, copies={**new.copies, **spec.copies}, notes=[*new.notes, *spec.notes])


def check_not_running_elsewhere(workspace: Workspace, run_id: str) -> None:
    """Raises RunError for a run that has not ended on another machine, and was not cancelled.

    Such a machine may not be reached for long, or ever again: a queued cancellation is enough.
    """
    folder = RunFolder(workspace.runs / run_id)
    if not folder.is_remote or folder.cancel_waited_s() is not None:
        return
    if not folder.read().status.is_final:
        machine = read_json(folder.path / REMOTE_FILE, JobSpec).machine.name
        raise RunError(
            f"run {run_id!r} may still be running on {machine}: no end of it was reported, and "
            "resuming it would run it twice",
            "wait until it ends (get_run), or, if the machine is gone for good, call cancel_run "
            "first: this call then resumes at once from the last downloaded checkpoint, and the "
            f"cancellation is queued until {machine} answers",
        )


def check_not_written_elsewhere(workspace: Workspace, output: Path) -> None:
    """Raises OutputHeldError if a run on another machine writes an output.

    Such a run has no lock here.
    """
    for folder in all_runs(workspace):
        if not folder.is_remote:
            continue
        with suppress(OSError, DataError):
            if folder.read().status.is_final:
                continue
            spec = read_json(folder.path / REMOTE_FILE, JobSpec)
            if any(workspace.root / name == output for name in spec.outputs):
                raise OutputHeldError(
                    f"{workspace.shown(output)} is being written by {folder.run_id} on "
                    f"{spec.machine.name}",
                    f"wait for its end (get_run), or stop it with `stillroom cancel-run "
                    f"{folder.run_id}`",
                )


def check_setup(workspace: Workspace, request: CheckSetup) -> SetupReport:
    """Returns what this machine has and lacks, or with `where` what that machine does."""
    if request.where is None:
        return check_this_machine(workspace, request)
    return check_machine(workspace, request, request.where)

"""plan_training with `where`: the forecast for a machine, from its known hardware and runs."""

from collections.abc import Callable

from stillroom.errors import InputError, missing_extra
from stillroom.jobs import child_work
from stillroom.remote.bundle.checks import check_remote_config
from stillroom.remote.host import RunHost
from stillroom.remote.hosts import open_host
from stillroom.remote.known_machines import hardware_of, probe_machine
from stillroom.remote.machine import Machine
from stillroom.remote.machines import all_machines, find_machine
from stillroom.settings import Workspace
from stillroom.train.config.file import load_config
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.forecast import TrainingForecast


def plan_training(
    workspace: Workspace,
    request: PlanTraining,
    *,
    open_machine: Callable[[Machine], RunHost] = open_host,
) -> TrainingForecast:
    """Returns the forecast of a training run, on this machine or on the request's `where`.

    A machine whose hardware is not known yet is probed once. Raises an EngineError if
    start_training would reject the request.
    """
    if request.where is None:
        return child_work.plan_training(workspace, request)
    config = load_config(workspace.existing(request.config, label="config"), request.overrides)
    chosen = find_machine(workspace, request.where)
    check_remote_config(config, chosen)
    hardware = hardware_of(workspace, chosen, config)
    if not hardware.is_known:
        _probe(workspace, chosen, open_machine)
        hardware = hardware_of(workspace, chosen, config)
    others = [machine for machine in all_machines(workspace) if machine.name != chosen.name]
    alternatives = (hardware_of(workspace, machine, config) for machine in others)
    try:
        from stillroom.train.planning.other_machines import plan_on_machines
    except ModuleNotFoundError as error:
        raise missing_extra("train", "planning a training run") from error
    return plan_on_machines(
        workspace, request, [hardware, *(other for other in alternatives if other.is_known)]
    )


def _probe(
    workspace: Workspace, machine: Machine, open_machine: Callable[[Machine], RunHost]
) -> None:
    """Probes a machine and caches the result. Raises an EngineError if it cannot be probed."""
    if not machine.access.can_be_probed:
        raise InputError(
            f"{machine.name} is a Ray cluster, whose GPUs stillroom cannot query",
            "plan without `where` to see the memory needed; `ray status` shows the cluster's GPUs",
        )
    probe_machine(workspace, machine, open_machine(machine))

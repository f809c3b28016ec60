"""Lists the machines of machines.yml: how they are, which runs are there, what still costs."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from stillroom.errors import EngineError
from stillroom.remote.host import RunHost
from stillroom.remote.hosts import open_host
from stillroom.remote.known_machines import ask_machine, hardware_of, recall, remote_runs
from stillroom.remote.machine import Machine
from stillroom.remote.machines import all_machines
from stillroom.remote.providers.clean_up import start_clean_up, wake_followers
from stillroom.remote.providers.provision_log import ProvisionedMachine, ProvisionLog
from stillroom.remote.records import MachineFacts, RemoteView
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.types import OthersText
from stillroom.validation import StrictModel

ASK_S = 25.0
"""How long machines are waited for that are asked; hosts of servers give up a call after 60 s."""

MachineState = Literal["in_use", "answers", "unreachable", "up", "down", "not_asked"]
"""`up`: we brought it up and no run needs it, so it is being put down; `down`: it costs nothing and
is brought up for a run; `not_asked`: nothing of ours runs there, and nobody has asked it."""


class ListMachines(StrictModel):
    """Ask which machines there are, beside this one."""

    check: Annotated[bool, Field(description="Ask each now; else what is known is told")] = False


class MachineRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a machine does, or is about to do."""

    run_id: str
    phase: str
    last_contact: str | None
    problem: OthersText | None
    machine_usd: float | None


class MachineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of machines.yml, or one that is still up although its entry is gone."""

    name: str
    kind: str
    address: str
    """How it is reached, or what is asked of its provider."""
    state: MachineState
    computes: str
    """Its GPUs or processors, as it answered last."""
    gpu_memory_gb: list[float]
    free_disk_gb: float | None
    asked_at: str | None
    """When it was asked for that; None if it never was."""
    price_per_hour: float | None
    usd_per_hour_now: float | None
    """What it costs at the moment as far as we cause it; 0 if nothing, None if not known."""
    spent_usd: float
    """What this workspace's runs there have cost, without teachers."""
    runs: list[MachineRun]
    problem: OthersText | None = None
    """Why it did not answer, or may cost without need, and what to do."""


class MachineList(msgspec.Struct, frozen=True, kw_only=True):
    """The machines, those of the project first."""

    machines: list[MachineSummary]
    usd_per_hour_now: float
    """What all of them cost at the moment, as far as it is known."""


@dataclass(slots=True)
class _RunsThere:
    """This workspace's runs on one machine."""

    open: list[MachineRun] = field(default_factory=list[MachineRun])
    spent_usd: float = 0.0
    is_used: bool = False
    """Whether a run has the machine at this moment."""

    @property
    def is_silent(self) -> bool:
        """Whether the machine has runs and answers none of their followers."""
        return bool(self.open) and all(run.problem is not None for run in self.open)


def list_machines(
    workspace: Workspace,
    request: ListMachines,
    *,
    opened: Callable[[Machine], RunHost] = open_host,
    provision_log: ProvisionLog | None = None,
    release: Callable[[ProvisionLog], None] = start_clean_up,
) -> MachineList:
    """Returns all machines; with `check` each is asked, for at most 25 seconds altogether.

    What we brought up and no run needs is put down by a process that is started here.
    Raises ConfigError if machines.yml is malformed.
    """
    machines = all_machines(workspace)
    provision_log = provision_log or ProvisionLog()
    provisioned: dict[str, list[ProvisionedMachine]] = {}
    for entry in provision_log.entries():
        provisioned.setdefault(entry.machine.name, []).append(entry)
        wake_followers(entry)
    answers = ask_all(workspace, machines, opened) if request.check else {}
    runs = _runs_by_machine(workspace)
    known = {machine.name for machine in machines}
    left = [entries[0].machine for name, entries in provisioned.items() if name not in known]
    listed = [
        _summary(
            workspace,
            machine,
            runs.get(machine.name, _RunsThere()),
            provisioned.get(machine.name, []),
            answers.get(machine.name),
        )
        for machine in (*machines, *left)
    ]
    if any(entry.is_abandoned for entries in provisioned.values() for entry in entries):
        release(provision_log)
    total = sum(machine.usd_per_hour_now or 0.0 for machine in listed)
    return MachineList(machines=listed, usd_per_hour_now=total)


def ask_all(
    workspace: Workspace,
    machines: Sequence[Machine],
    opened: Callable[[Machine], RunHost],
    *,
    most_s: float = ASK_S,
) -> Mapping[str, MachineFacts | EngineError]:
    """Returns what each machine answers by its name, or why it does not, within a time.

    Of a machine that is not up its provider may answer; nothing is brought up.
    """
    answers: dict[str, MachineFacts | EngineError] = {}

    def ask(machine: Machine) -> None:
        try:
            answers[machine.name] = ask_machine(workspace, machine, opened(machine))
        except EngineError as error:
            answers[machine.name] = error

    askable = [machine for machine in machines if machine.access.can_be_probed]
    threads = [threading.Thread(target=ask, args=(one,), daemon=True) for one in askable]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + most_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = EngineError(
        f"it did not answer within {most_s:g} s", "look whether `ssh` reaches it by hand"
    )
    return {machine.name: answers.get(machine.name, silent) for machine in askable}


def _runs_by_machine(workspace: Workspace) -> dict[str, _RunsThere]:
    found: dict[str, _RunsThere] = {}
    for folder, spec, view in remote_runs(workspace):
        there = found.setdefault(spec.machine.name, _RunsThere())
        there.spent_usd += (view.machine_usd if view is not None else None) or 0.0
        if view is None or view.phase != "over":
            there.open.append(_run(folder, view))
            there.is_used |= view is not None and view.phase != "waiting"
    return found


def _run(folder: RunFolder, view: RemoteView | None) -> MachineRun:
    return MachineRun(
        run_id=folder.run_id,
        phase=view.phase if view is not None else "waiting",
        last_contact=view.last_contact if view is not None else None,
        problem=view.problem if view is not None else None,
        machine_usd=view.machine_usd if view is not None else None,
    )


def _summary(
    workspace: Workspace,
    machine: Machine,
    runs: _RunsThere,
    provisioned: Sequence[ProvisionedMachine],
    answer: MachineFacts | EngineError | None,
) -> MachineSummary:
    known, hardware = recall(workspace, machine), hardware_of(workspace, machine)
    price = hardware.price_per_hour
    if machine.price_per_hour is None and provisioned:
        price = provisioned[0].price_per_hour or price
    num_costing = max(len(provisioned), 1 if runs.is_used else 0)
    return MachineSummary(
        name=machine.name,
        kind=machine.access.kind,
        address=machine.access.summary,
        state=_state(machine, runs, provisioned, answer),
        computes=hardware.words,
        gpu_memory_gb=list(hardware.gpu_memory_gb),
        free_disk_gb=hardware.free_disk_gb,
        asked_at=known.asked_at if known is not None else None,
        price_per_hour=price,
        usd_per_hour_now=_cost(num_costing, price),
        spent_usd=runs.spent_usd,
        runs=runs.open,
        problem=_problem(runs, provisioned, answer),
    )


def _cost(num: int, price: float | None) -> float | None:
    """Returns the US dollars an hour of machines of one price; None if that is not known."""
    if not num:
        return 0.0
    return None if price is None else num * price


def _state(
    machine: Machine,
    runs: _RunsThere,
    provisioned: Sequence[ProvisionedMachine],
    answer: MachineFacts | EngineError | None,
) -> MachineState:
    is_down = machine.access.is_provisioned and not provisioned
    if not is_down and (isinstance(answer, EngineError) or (answer is None and runs.is_silent)):
        return "unreachable"
    if runs.is_used or _is_needed(provisioned):
        return "in_use"
    if machine.access.is_provisioned:
        return "down" if is_down else "up"
    return "answers" if isinstance(answer, MachineFacts) else "not_asked"


def _is_needed(provisioned: Sequence[ProvisionedMachine]) -> bool:
    """Whether a run of any workspace still needs a machine that we brought up."""
    return any(not entry.is_abandoned for entry in provisioned)


def _problem(
    runs: _RunsThere,
    provisioned: Sequence[ProvisionedMachine],
    answer: MachineFacts | EngineError | None,
) -> str | None:
    for entry in provisioned:
        if entry.is_abandoned:
            return (
                f"it is up since {entry.since} and no run needs it: it is being put down now; if "
                f"it is still listed in some minutes, run `{entry.release_command}`"
            )
    if isinstance(answer, EngineError):
        return f"{answer.problem} ({answer.fix})"
    return next((run.problem for run in runs.open if run.problem is not None), None)

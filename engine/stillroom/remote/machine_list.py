"""Lists the machines of machines.yml: their state, their runs, and their current cost."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from stillroom import bounds
from stillroom.errors import EngineError
from stillroom.remote.host import RunHost
from stillroom.remote.hosts import open_host
from stillroom.remote.known_machines import hardware_of, load_probe, probe_machine, remote_runs
from stillroom.remote.machine import Machine
from stillroom.remote.machines import all_machines
from stillroom.remote.providers.clean_up import restart_followers, start_clean_up
from stillroom.remote.providers.provision_log import ProvisionedMachine, ProvisionLog
from stillroom.remote.records import MachineFacts
from stillroom.run_folder import RemoteView, RunFolder
from stillroom.settings import Workspace
from stillroom.types import OthersText
from stillroom.validation import StrictModel

PROBE_S = float(bounds.PROBE.limit)
"""The timeout of all probes together; agent hosts time out a call after 60 s."""

MachineState = Literal["in_use", "answers", "unreachable", "up", "down", "not_asked"]
"""`up`: provisioned, but no run needs it, so it is being released; `down`: not provisioned, so it
costs nothing; `not_asked`: no run of this workspace is on it, and this call did not probe it."""


class ListMachines(StrictModel):
    """List the machines that runs may name."""

    check: Annotated[bool, Field(description="Probe each now, else show the last probes")] = False


class MachineRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is active on a machine or waits for it."""

    run_id: str
    phase: str
    last_contact: str | None
    problem: OthersText | None
    machine_usd: float | None


class MachineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of machines.yml, or one that is still up after its entry was removed."""

    name: str
    kind: str
    address: str
    """How it is reached, or what is requested from its provider."""
    state: MachineState
    computes: OthersText
    """Its GPUs or processors, from its last probe."""
    gpu_memory_gb: list[float]
    free_disk_gb: float | None
    asked_at: str | None
    """When it was last probed; None if it never was."""
    price_per_hour: float | None
    usd_per_hour_now: float | None
    """The current cost of the machine; None if unknown.

    A user's own machine counts as up while a run is on it or if it answers the probe of this call;
    otherwise its cost is unknown.
    """
    spent_usd: float
    """What the machine has cost for this workspace's runs, without their teachers; if it was
    provisioned, until its release."""
    budget_usd: float | None = None
    """Its `budget_usd` in machines.yml, if it has one."""
    runs: list[MachineRun]
    problem: OthersText | None = None
    """Why it did not answer, or why it may cost money although no run needs it, and what to do."""


class MachineList(msgspec.Struct, frozen=True, kw_only=True):
    """The machines, the project's first."""

    machines: list[MachineSummary]
    usd_per_hour_now: float | None
    """The current cost of the machines whose cost is known.

    None if that is 0 and other machines' cost is unknown, which `check` may determine.
    """


@dataclass(slots=True)
class _ListedMachine:
    """One machine with its runs, its provisioned instances, and the result of this call's probe."""

    machine: Machine
    runs: list[MachineRun] = field(default_factory=list[MachineRun])
    """This workspace's runs that are active on it or wait for it."""
    spent_usd: float = 0.0
    is_used: bool = False
    """Whether a run of this workspace is using the machine now."""
    provisioned: list[ProvisionedMachine] = field(default_factory=list[ProvisionedMachine])
    probed: MachineFacts | EngineError | None = None

    def add(self, folder: RunFolder, view: RemoteView) -> None:
        """Adds a run on the machine."""
        self.spent_usd += view.spent_usd or 0.0
        if view.phase == "over":
            return
        self.is_used |= view.phase != "waiting"
        self.runs.append(
            MachineRun(
                run_id=folder.run_id,
                phase=view.phase,
                last_contact=view.last_contact,
                problem=view.problem,
                machine_usd=view.machine_usd,
            )
        )

    @property
    def abandoned(self) -> ProvisionedMachine | None:
        """A provisioned machine that no run of any workspace needs any more; None if none."""
        return next((entry for entry in self.provisioned if entry.is_abandoned), None)

    def summary(self, workspace: Workspace) -> MachineSummary:
        """Returns the machine's entry in the result."""
        machine = self.machine
        last_probe, hardware = load_probe(workspace, machine), hardware_of(workspace, machine)
        price = hardware.price_per_hour
        if machine.price_per_hour is None and self.provisioned:
            price = self.provisioned[0].price_per_hour or price
        return MachineSummary(
            name=machine.name,
            kind=machine.access.kind,
            address=machine.access.summary,
            state=self._state(),
            computes=hardware.description,
            gpu_memory_gb=list(hardware.gpu_memory_gb),
            free_disk_gb=hardware.free_disk_gb,
            asked_at=last_probe.probed_at if last_probe is not None else None,
            price_per_hour=price,
            usd_per_hour_now=self._usd_per_hour_now(price),
            spent_usd=self.spent_usd,
            budget_usd=machine.budget_usd,
            runs=self.runs,
            problem=self._problem(),
        )

    def _usd_per_hour_now(self, price: float | None) -> float | None:
        """Returns the current cost of the machine; None if the price or its use is unknown."""
        num_billed = max(len(self.provisioned), int(self.is_used))
        if not num_billed and self.machine.access.is_provisioned:
            return 0.0
        is_up = num_billed > 0 or isinstance(self.probed, MachineFacts)
        return price and max(num_billed, 1) * price if is_up or price == 0 else None

    def _state(self) -> MachineState:
        """Returns whether the machine is used, up or down, and whether it has answered."""
        is_down = self.machine.access.is_provisioned and not self.provisioned
        is_unreachable = isinstance(self.probed, EngineError)
        if self.probed is None and self.runs:
            is_unreachable = all(run.problem is not None for run in self.runs)
        if is_unreachable and not is_down:
            return "unreachable"
        if self.is_used or any(not entry.is_abandoned for entry in self.provisioned):
            return "in_use"
        if self.machine.access.is_provisioned:
            return "down" if is_down else "up"
        return "answers" if isinstance(self.probed, MachineFacts) else "not_asked"

    def _problem(self) -> str | None:
        """Returns the machine's most important problem; None if it has none."""
        if (entry := self.abandoned) is not None:
            return (
                f"up since {entry.since}, but no run needs it: it is being released now; if it is "
                f"still listed in a few minutes, run `{entry.release_command}`"
            )
        if isinstance(self.probed, EngineError):
            return f"{self.probed.problem} ({self.probed.fix})"
        return next((run.problem for run in self.runs if run.problem is not None), None)


def list_machines(
    workspace: Workspace,
    request: ListMachines,
    *,
    open_machine: Callable[[Machine], RunHost] = open_host,
    provision_log: ProvisionLog | None = None,
    release: Callable[[ProvisionLog], None] = start_clean_up,
) -> MachineList:
    """Returns all machines; with `check`, probes them concurrently within 25 seconds.

    Starts a process that releases provisioned machines that no run needs.
    Raises ConfigError if machines.yml is malformed.
    """
    machines = all_machines(workspace)
    provision_log = provision_log or ProvisionLog()
    listed = {machine.name: _ListedMachine(machine) for machine in machines}
    for entry in provision_log.entries():
        restart_followers(entry)
        listed.setdefault(entry.machine.name, _ListedMachine(entry.machine)).provisioned.append(
            entry
        )
    if request.check:
        for name, result in probe_all(workspace, machines, open_machine).items():
            listed[name].probed = result
    for folder, spec, view in remote_runs(workspace):
        if spec.machine.name in listed:
            listed[spec.machine.name].add(folder, view)
    if any(each.abandoned is not None for each in listed.values()):
        release(provision_log)
    summaries = [each.summary(workspace) for each in listed.values()]
    costs = [machine.usd_per_hour_now for machine in summaries]
    total = sum(cost or 0.0 for cost in costs)
    return MachineList(
        machines=summaries, usd_per_hour_now=None if None in costs and not total else total
    )


def probe_all(
    workspace: Workspace,
    machines: Sequence[Machine],
    open_machine: Callable[[Machine], RunHost],
    *,
    timeout_s: float = PROBE_S,
) -> Mapping[str, MachineFacts | EngineError]:
    """Probes machines concurrently; returns each machine's facts or error by name.

    A machine that does not answer in time gets an error. For a machine that is not up, its provider
    is queried; nothing is provisioned.
    """
    results: dict[str, MachineFacts | EngineError] = {}

    def probe(machine: Machine) -> None:
        try:
            results[machine.name] = probe_machine(workspace, machine, open_machine(machine))
        except EngineError as error:
            results[machine.name] = error

    machines = [machine for machine in machines if machine.access.can_be_probed]
    threads = [threading.Thread(target=probe, args=(machine,), daemon=True) for machine in machines]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {
        machine.name: results.get(machine.name, _timeout_error(machine, timeout_s))
        for machine in machines
    }


def _timeout_error(machine: Machine, timeout_s: float) -> EngineError:
    """Returns the error for a machine whose probe is not done in time."""
    fix = "check whether `ssh` can connect to it"
    if machine.access.is_provisioned:
        fix = "try again: its provider may be slow; check that the provider's service is up"
    return EngineError(f"the probe timed out after {timeout_s:g} s", fix)

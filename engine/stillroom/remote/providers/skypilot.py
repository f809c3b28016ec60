"""A cluster that SkyPilot provisions, which ssh then reaches by the cluster's name."""

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.errors import EngineError
from stillroom.remote.channel import Channel, PipedProcess
from stillroom.remote.host import MachineGoneError, UnreachableError
from stillroom.remote.machine import Machine, SkyPilotCluster, SshAddress
from stillroom.remote.providers.provision_log import LockedEntry, ProvisionedMachine, ProvisionLog
from stillroom.remote.providers.sky_calls import (
    ClusterView,
    Offer,
    SkyCalls,
    SkyProcess,
    check_installed,
)
from stillroom.remote.records import LaunchRequest, MachineFacts
from stillroom.remote.ssh.connection import SshChannel
from stillroom.remote.ssh.host import ChannelHost

_WAIT_S = 20.0
_LOOK_AGAIN_S = 30.0


class SkyPilotHost(ChannelHost):
    """A `RunHost` on a cluster that SkyPilot provisions and deletes.

    The runs of one machine share its cluster. `run` is the folder of the run that it is for;
    without one nothing is ever provisioned.
    """

    def __init__(
        self,
        machine: Machine,
        run: Path | None,
        *,
        calls: SkyCalls | SkyProcess,
        provision_log: ProvisionLog,
        by_ssh: Callable[[str, SshAddress], Channel] = SshChannel,
        python: str | None = None,
    ) -> None:
        """by_ssh: connects to the cluster. python: an interpreter on it that has this code."""
        self._cluster = machine.skypilot or SkyPilotCluster(resources={})
        self._run, self._sky, self._log = run, calls, provision_log
        self._name = cluster_name(machine, provision_log)
        channel = by_ssh(machine.name, SshAddress(host=self._name))
        super().__init__(machine, _ClusterChannel(channel, self._explained), python=python)
        self._looked_at = -_LOOK_AGAIN_S
        self._offer: Offer | None = None
        self._has_asked = False
        self._is_gone = False
        """Whether the cluster was gone at the last look."""

    @property
    def name(self) -> str:
        """The cluster's name, by which SkyPilot and ssh know it."""
        return self._name

    @property
    def _own_run(self) -> Path:
        if self._run is None:
            raise ValueError("only a run provisions a machine or is started on it")
        return self._run

    def provision(self) -> None:
        """Provisions the cluster, or takes the one that is up.

        Raises UnreachableError every 20 seconds until it is, so that the caller can stop waiting.
        """
        for _ in range(2):
            request_id = self._take_or_request()
            if request_id is None:
                return
            if self._sky.call(SkyCalls.outcome, request_id, wait_s=_WAIT_S) == "waiting":
                raise UnreachableError(
                    f"SkyPilot is still provisioning {self._name}",
                    f"no action needed, it takes minutes; progress: `sky api logs {request_id}`",
                )
        raise UnreachableError(
            f"SkyPilot has provisioned {self._name} and reports that it is not up",
            f"no action needed: it is retried; `sky status {self._name}` shows its state",
        )

    def price_per_hour(self) -> float | None:
        """Returns machines.yml's price, else that of the cluster that is up, or of an offer."""
        if self.machine.price_per_hour is not None:
            return self.machine.price_per_hour
        entry = self._log.find(self._name)
        if entry is not None:
            return entry.price_per_hour
        offer = self._find_offer()
        return None if offer is None else offer.price_per_hour

    def facts(self) -> MachineFacts:
        """Probes the cluster if it is up; else returns what SkyPilot would provision."""
        view = self._sky.call(SkyCalls.look, self._name)
        if view is not None and view.is_up:
            self._sky.call(SkyCalls.write_ssh_entry, self._name)
            return super().facts()
        offer = self._find_offer()
        if offer is None:
            return MachineFacts(system="a SkyPilot cluster, which the first run provisions")
        return MachineFacts(
            system=f"a SkyPilot cluster, which the first run provisions, e.g. {offer.instance}",
            num_processors=offer.num_processors,
            memory_gb=offer.memory_gb,
            gpus=offer.gpus,
            gpu_memory_gb=offer.gpu_memory_gb,
        )

    def start(self, run: LaunchRequest) -> None:
        """Starts the worker, which from now on keeps the cluster up by itself."""
        with self._log.holding(self._name) as held:
            held.add(self.machine, self._name, self._own_run)
            held.mark_started(self._own_run)
        # Before the start: a worker without it would lose its machine with our connection.
        self._sky.call(SkyCalls.hold, self._name, folder=self.machine.folder)
        super().start(run)

    def remove(self, run_id: str) -> None:
        """Deletes the run's folder on the cluster; with a cluster that is gone, it is gone, too."""
        with suppress(MachineGoneError):
            super().remove(run_id)

    def release(self) -> None:
        """Deletes the cluster unless another of our runs is on it; there may be none.

        Raises UnreachableError if that could not be done; the provision log then still names it.
        """
        with self._log.holding(self._name) as held:
            if held.entry is not None and held.drop_run(self._run):
                self._sky.call(SkyCalls.release, self._name)
                self._check_gone(held, held.entry)

    def _find_offer(self) -> Offer | None:
        if not self._has_asked:
            self._offer, self._has_asked = self._sky.call(SkyCalls.offer, self._cluster), True
        return self._offer

    def _take_or_request(self) -> str | None:
        """Returns the request that provisions the cluster; None if it is up, and now in use."""
        with self._log.holding(self._name) as held:
            entry = held.add(self.machine, self._name, self._own_run)
            outcome = None
            if entry.request_id is not None:
                # Before the look at the cluster: it may come up between the two.
                outcome = self._sky.call(SkyCalls.outcome, entry.request_id)
            if outcome == "waiting":
                return entry.request_id
            view = self._sky.call(SkyCalls.look, self._name)
            if view is not None and view.is_up:
                self._take(held, view)
                return None
            # A run that was started on it would start over, at the cost of the first one.
            if str(self._run) in entry.started and (view is None or view.is_stopped):
                raise self._gone(view)
            if entry.request_id is not None and outcome == "failed":
                self._clear_away(held)
                self._sky.call(SkyCalls.raise_failure, entry.request_id, self._name)
            return self._launch(held)

    def _take(self, held: LockedEntry, view: ClusterView) -> None:
        held.update(request_id=None, price_per_hour=view.price_per_hour)
        # The job of the launch may have ended with an earlier run.
        self._sky.call(SkyCalls.hold, self._name, folder=self.machine.folder)
        self._sky.call(SkyCalls.write_ssh_entry, self._name)

    def _launch(self, held: LockedEntry) -> str:
        request_id = self._sky.call(
            SkyCalls.launch, self._name, self._cluster, folder=self.machine.folder
        )
        held.update(request_id=request_id)
        return request_id

    def _clear_away(self, held: LockedEntry) -> None:
        """Deletes what a failed launch has left, which costs money too."""
        if held.drop_run(self._run):
            self._sky.call(SkyCalls.release, self._name)
            held.forget()
        else:
            held.update(request_id=None)

    def _check_gone(self, held: LockedEntry, entry: ProvisionedMachine) -> None:
        """Removes the cluster from the log once SkyPilot no longer knows it.

        A launch that a kill cut off may still be on its way to SkyPilot, so an entry without an
        answer stays for a while.
        """
        view = self._sky.call(SkyCalls.look, self._name)
        if view is not None:
            raise UnreachableError(
                f"the cluster {self._name} still exists after it was deleted ({view.status})",
                f"no action needed: it is retried; by hand: `sky down -y {self._name}`",
            )
        self._is_gone = True
        if entry.is_answered or entry.is_old:
            held.forget()

    def _explained(self, error: EngineError) -> EngineError:
        """Returns that the cluster no longer exists, if that is why it does not answer."""
        is_due = self._is_gone or time.monotonic() - self._looked_at >= _LOOK_AGAIN_S
        if isinstance(error, UnreachableError) and is_due:
            self._looked_at = time.monotonic()
            view = self._sky.call(SkyCalls.look, self._name)
            if view is None or view.is_stopped:
                return self._gone(view)
        return error

    def _gone(self, view: ClusterView | None) -> MachineGoneError:
        self._is_gone = True
        state = "was stopped" if view is not None else "no longer exists"
        spot = " (a spot machine, which its provider may take back)" if self._is_spot else ""
        return MachineGoneError(
            f"the cluster {self._name} {state}{spot}",
            f"what it wrote after the last downloaded checkpoint is lost; continue with "
            f"`resume`, on {self.machine.name} again or elsewhere",
        )

    @property
    def _is_spot(self) -> bool:
        return bool(self._cluster.resources.get("use_spot"))


class _ClusterChannel:
    """A channel to a cluster; an error of the connection says whether the cluster still exists."""

    def __init__(self, channel: Channel, explained: Callable[[EngineError], EngineError]) -> None:
        self._channel, self._explained = channel, explained

    @property
    def name(self) -> str:
        """What errors call the machine."""
        return self._channel.name

    def open(self) -> PipedProcess:
        """Starts a shell on the cluster; also raises MachineGoneError."""
        try:
            return self._channel.open()
        except UnreachableError as error:
            raise self._explained(error) from error

    def explain(self, exit_code: int | None, printed: str) -> EngineError | None:
        """Returns what a broken command says about the connection or the cluster."""
        error = self._channel.explain(exit_code, printed)
        return None if error is None else self._explained(error)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def open_cluster(
    machine: Machine, run: Path | None = None, *, provision_log: ProvisionLog | None = None
) -> SkyPilotHost:
    """Returns the host for a machine that SkyPilot provisions; nothing is provisioned yet.

    Raises MissingExtraError if SkyPilot is not installed.
    """
    check_installed()
    return SkyPilotHost(
        machine,
        run,
        calls=SkyProcess(),
        provision_log=provision_log or ProvisionLog(),
    )


def cluster_name(machine: Machine, provision_log: ProvisionLog) -> str:
    """Returns the name of a machine's cluster: the same for all of this user's runs on it here."""
    content = msgspec.json.encode([machine.skypilot, machine.folder, provision_log.identity])
    label = "".join(each if each.isalnum() else "-" for each in machine.name.lower())[:24]
    return f"stillroom-{label.strip('-')}-{hashlib.sha256(content).hexdigest()[:8]}"

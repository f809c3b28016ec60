"""A cluster that SkyPilot provisions and that ssh then reaches by the cluster's name."""

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

_LAUNCH_WAIT_S = 20.0
_CHECK_EVERY_S = 30.0


class SkyPilotHost(ChannelHost):
    """A `RunHost` for a cluster that SkyPilot provisions and deletes.

    All runs on a machine share its cluster. `run` is the folder of the run that uses it;
    without one, nothing is ever provisioned.
    """

    def __init__(
        self,
        machine: Machine,
        run: Path | None,
        *,
        calls: SkyCalls | SkyProcess,
        provision_log: ProvisionLog,
        open_channel: Callable[[str, SshAddress], Channel] = SshChannel,
        python: str | None = None,
    ) -> None:
        """open_channel: connects to the cluster. python: an interpreter on it with this code."""
        # Machines of this kind have `skypilot`; the default only satisfies the type checker.
        self._cluster = machine.skypilot or SkyPilotCluster(resources={})
        self._run, self._sky, self._log = run, calls, provision_log
        self._name = cluster_name(machine, provision_log)
        channel = open_channel(machine.name, SshAddress(host=self._name))
        super().__init__(machine, _ClusterChannel(channel, self._check_cluster), python=python)
        self._checked_at = -_CHECK_EVERY_S
        self._offer: Offer | None = None
        self._has_offer = False
        self._is_gone = False
        """Whether the cluster did not exist at the last status query."""

    @property
    def name(self) -> str:
        """The cluster's name in SkyPilot and ssh."""
        return self._name

    @property
    def _run_folder(self) -> Path:
        if self._run is None:
            raise ValueError("this host was opened without a run")
        return self._run

    def provision(self) -> None:
        """Provisions the cluster, or uses the existing one.

        Raises UnreachableError after 20 seconds of waiting, so that the caller can stop or retry.
        """
        for _ in range(2):
            request_id = self._find_or_launch()
            if request_id is None:
                return
            if self._sky.call(SkyCalls.outcome, request_id, wait_s=_LAUNCH_WAIT_S) == "waiting":
                raise UnreachableError(
                    f"SkyPilot is still provisioning {self._name}",
                    f"no action needed: it takes minutes; progress: `sky api logs {request_id}`",
                )
        raise UnreachableError(
            f"SkyPilot has provisioned {self._name}, but reports that it is not up",
            f"no action needed: Stillroom retries; `sky status {self._name}` shows its state",
        )

    def price_per_hour(self) -> float | None:
        """Returns the price in US dollars per hour: configured, of the cluster, or of an offer."""
        if self.machine.price_per_hour is not None:
            return self.machine.price_per_hour
        entry = self._log.find(self._name)
        if entry is not None:
            return entry.price_per_hour
        offer = self._find_offer()
        return None if offer is None else offer.price_per_hour

    def facts(self) -> MachineFacts:
        """Probes the cluster if it is up; otherwise returns what SkyPilot would provision."""
        view = self._sky.call(SkyCalls.get_cluster, self._name)
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
        """Starts the run's worker; from now on, the cluster stays up as long as the worker runs."""
        with self._log.lock_entry(self._name) as locked:
            locked.add(self.machine, self._name, self._run_folder)
            locked.mark_started(self._run_folder)
        # Before the start, so that the cluster is not deleted if the connection is lost meanwhile.
        self._sky.call(SkyCalls.submit_hold_job, self._name, folder=self.machine.folder)
        super().start(run)

    def remove(self, run_id: str) -> None:
        """Deletes the run's folder on the cluster; does nothing if the cluster is gone."""
        with suppress(MachineGoneError):
            super().remove(run_id)

    def release(self) -> None:
        """Deletes the cluster, if there is one and no other run is on it.

        Raises UnreachableError if that failed; the provision log then keeps the entry.
        """
        with self._log.lock_entry(self._name) as locked:
            if locked.entry is not None and locked.drop_run(self._run):
                self._sky.call(SkyCalls.release, self._name)
                self._check_deleted(locked, locked.entry)

    def _find_offer(self) -> Offer | None:
        """Returns the cheapest machine that SkyPilot offers; the result is cached."""
        if not self._has_offer:
            self._offer, self._has_offer = self._sky.call(SkyCalls.find_offer, self._cluster), True
        return self._offer

    def _find_or_launch(self) -> str | None:
        """Returns the id of the request that provisions the cluster; None if it is already up."""
        with self._log.lock_entry(self._name) as locked:
            entry = locked.add(self.machine, self._name, self._run_folder)
            outcome = None
            if entry.request_id is not None:
                # Queried before the cluster's status, as it may come up between the two calls.
                outcome = self._sky.call(SkyCalls.outcome, entry.request_id)
            if outcome == "waiting":
                return entry.request_id
            view = self._sky.call(SkyCalls.get_cluster, self._name)
            if view is not None and view.is_up:
                self._use_cluster(locked, view)
                return None
            # A run that was started on the cluster would start over on a new one.
            if str(self._run) in entry.started and (view is None or view.is_stopped):
                raise self._gone_error(view)
            if entry.request_id is not None and outcome == "failed":
                self._delete_failed_launch(locked)
                self._sky.call(SkyCalls.raise_failure, entry.request_id, self._name)
            return self._launch(locked)

    def _use_cluster(self, locked: LockedEntry, view: ClusterView) -> None:
        """Records that the cluster is up, and prepares it for the run."""
        locked.update(request_id=None, price_per_hour=view.price_per_hour)
        # The hold job of the launch request may have ended after an earlier run.
        self._sky.call(SkyCalls.submit_hold_job, self._name, folder=self.machine.folder)
        self._sky.call(SkyCalls.write_ssh_entry, self._name)

    def _launch(self, locked: LockedEntry) -> str:
        """Requests the cluster and returns the request's id."""
        request_id = self._sky.call(
            SkyCalls.launch, self._name, self._cluster, folder=self.machine.folder
        )
        locked.update(request_id=request_id)
        return request_id

    def _delete_failed_launch(self, locked: LockedEntry) -> None:
        """Deletes the remains of a failed launch, which may cost money."""
        if locked.drop_run(self._run):
            self._sky.call(SkyCalls.release, self._name)
            locked.remove()
        else:
            locked.update(request_id=None)

    def _check_deleted(self, locked: LockedEntry, entry: ProvisionedMachine) -> None:
        """Raises UnreachableError, so that deletion is retried, while the cluster still exists.

        Otherwise removes the cluster's entry from the provision log. If SkyPilot never acknowledged
        the launch request, the entry is kept until the request can no longer take effect.
        """
        view = self._sky.call(SkyCalls.get_cluster, self._name)
        if view is not None:
            raise UnreachableError(
                f"the cluster {self._name} still exists after it was deleted ({view.status})",
                f"no action needed: Stillroom retries; to do it now: `sky down -y {self._name}`",
            )
        self._is_gone = True
        if entry.is_answered or entry.is_request_expired:
            locked.remove()

    def _check_cluster(self, error: EngineError) -> EngineError:
        """Returns a MachineGoneError if the cluster no longer exists, else the given error."""
        is_due = self._is_gone or time.monotonic() - self._checked_at >= _CHECK_EVERY_S
        if isinstance(error, UnreachableError) and is_due:
            self._checked_at = time.monotonic()
            view = self._sky.call(SkyCalls.get_cluster, self._name)
            if view is None or view.is_stopped:
                return self._gone_error(view)
        return error

    def _gone_error(self, view: ClusterView | None) -> MachineGoneError:
        """Returns the error for a cluster that was stopped, or if `view` is None, deleted."""
        self._is_gone = True
        state = "was stopped" if view is not None else "no longer exists"
        spot = " (a spot machine, which its provider may preempt)" if self._is_spot else ""
        return MachineGoneError(
            f"the cluster {self._name} {state}{spot}",
            "see `sky status` and the provider's console for the reason",
        )

    @property
    def _is_spot(self) -> bool:
        return bool(self._cluster.resources.get("use_spot"))


class _ClusterChannel:
    """A channel to a cluster; its errors say so if the cluster no longer exists."""

    def __init__(
        self, channel: Channel, check_cluster: Callable[[EngineError], EngineError]
    ) -> None:
        self._channel, self._check_cluster = channel, check_cluster

    @property
    def name(self) -> str:
        """The machine's name in error messages."""
        return self._channel.name

    def open(self) -> PipedProcess:
        """Starts a shell on the cluster. Raises MachineGoneError if the cluster is gone."""
        try:
            return self._channel.open()
        except UnreachableError as error:
            raise self._check_cluster(error) from error

    def explain(self, exit_code: int | None, stderr: str) -> EngineError | None:
        """Returns the connection or cluster error of a failed command; None if there is none."""
        error = self._channel.explain(exit_code, stderr)
        return None if error is None else self._check_cluster(error)

    def close(self) -> None:
        """Closes the connection."""
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


def release_cluster(entry: ProvisionedMachine, provision_log: ProvisionLog) -> None:
    """Deletes the cluster of an entry of the provision log, unless a run still needs it.

    Raises MissingExtraError if SkyPilot is not installed.
    """
    host = open_cluster(entry.machine, provision_log=provision_log)
    try:
        host.release()
    finally:
        host.close()


def cluster_name(machine: Machine, provision_log: ProvisionLog) -> str:
    """Returns the name of a machine's cluster, which all runs of this user and computer share."""
    content = msgspec.json.encode([machine.skypilot, machine.folder, provision_log.identity])
    label = "".join(each if each.isalnum() else "-" for each in machine.name.lower())[:24]
    return f"stillroom-{label.strip('-')}-{hashlib.sha256(content).hexdigest()[:8]}"

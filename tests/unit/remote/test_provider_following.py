"""The follower of a run on a rented machine puts it down, whatever else goes wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.machines import add_remote_run
from stillroom.errors import EngineError
from stillroom.files import read_json
from stillroom.remote.follower.follower import Follower
from stillroom.remote.follower.local_run import read_record
from stillroom.remote.host import MachineError, MachineGoneError, UnreachableError
from stillroom.remote.machine import HfJobsFlavor, Machine, SkyPilotCluster
from stillroom.remote.records import JobSpec, MachineFacts, RemoteView
from stillroom.run_folder import REMOTE_FILE, VIEW_FILE, RunFolder
from stillroom.settings import Workspace
from stillroom.types import RunStatus

SKY = Machine(name="sky", skypilot=SkyPilotCluster(resources={"cpus": 4}), file="machines.yml")


class Host:
    """A rented machine whose every answer is scripted: an error, or nothing."""

    def __init__(self, *, price: float | None = 2.0, **answers: list[EngineError | None]) -> None:
        self._price, self._answers = price, answers
        self.calls: list[str] = []

    def provision(self) -> None:
        self._do("provision")

    def price_per_hour(self) -> float | None:
        return self._price

    def facts(self) -> MachineFacts:
        return MachineFacts(system="Linux")

    def prepare(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._do("prepare")

    def missing(self, blobs: Any) -> dict[str, int]:
        return {}

    def start(self, run: Any) -> None:
        self._do("start")

    def remove(self, run_id: str) -> None:
        self._do("remove")

    def release(self) -> None:
        self._do("release")

    def close(self) -> None: ...

    def _do(self, name: str) -> None:
        self.calls.append(name)
        left = self._answers.get(name, [])
        error = left.pop(0) if left else None
        if error is not None:
            raise error


def follow(run: RunFolder, host: Host) -> None:
    spec = read_json(run.path / REMOTE_FILE, JobSpec)
    Follower(run, spec, host, {}).run()


@pytest.fixture
def ended(tmp_path: Path) -> RunFolder:
    view = RemoteView(where="sky", phase="bringing_back", has_started=True)
    return add_remote_run(Workspace(tmp_path), view, machine=SKY, status=RunStatus.SUCCEEDED)


@pytest.fixture
def new(tmp_path: Path) -> RunFolder:
    return add_remote_run(Workspace(tmp_path), None, machine=SKY, status=RunStatus.STARTING)


def test_a_machine_is_put_down_although_the_runs_folder_cannot_be_removed(ended):
    host = Host(remove=[UnreachableError("no answer", "wait")])
    follow(ended, host)
    assert host.calls == ["remove", "release", "remove", "release"]


def test_a_machine_that_is_gone_is_struck_out_too(ended):
    host = Host(remove=[MachineGoneError("taken back", "resume")])
    follow(ended, host)
    assert host.calls == ["remove", "release"]


def test_putting_down_is_tried_until_it_is_done(ended):
    host = Host(release=[UnreachableError("the cloud is away", "wait")])
    follow(ended, host)
    assert host.calls.count("release") == 2


@pytest.mark.parametrize("step", ["provision", "prepare", "start"])
def test_a_run_that_cannot_begin_fails_and_its_machine_is_put_down(new, step):
    error = MachineGoneError if step == "start" else MachineError
    host = Host(**{step: [error("no credit", "pay")]})
    follow(new, host)
    state = new.read()
    assert state.status is RunStatus.FAILED
    assert "no credit" in state.error.problem
    assert "pay" in state.error.fix
    assert host.calls[-1] == "release"


def test_a_machine_that_takes_long_to_come_up_is_waited_for(new):
    host = Host(
        provision=[UnreachableError("still provisioning", "wait")],
        start=[MachineGoneError("-", "-")],
    )
    follow(new, host)
    assert host.calls.count("provision") == 2


def test_a_run_that_is_cancelled_while_its_machine_comes_up_puts_it_down(new):
    new.ask_to_cancel()
    host = Host(provision=[UnreachableError("still provisioning", "wait")] * 9)
    follow(new, host)
    assert new.read().status is RunStatus.CANCELLED
    assert host.calls[-1] == "release"


def test_a_budget_needs_a_price(tmp_path):
    run = add_remote_run(
        Workspace(tmp_path), None, machine=SKY, budget_usd=5.0, status=RunStatus.STARTING
    )
    host = Host(price=None)
    follow(run, host)
    state = run.read()
    assert state.status is RunStatus.FAILED
    assert "names no price" in state.error.problem
    assert "price_per_hour" in state.error.fix
    assert host.calls == ["provision", "release"]


def test_a_job_costs_nothing_before_its_run_is_started(tmp_path):
    machine = Machine(name="hf", hf_jobs=HfJobsFlavor(flavor="a10g-large"))
    run = add_remote_run(Workspace(tmp_path), None, machine=machine, status=RunStatus.STARTING)
    follow(run, Host(start=[MachineGoneError("no credit", "pay")]))
    assert read_record(run).used_since is None
    assert read_json(run.path / VIEW_FILE, RemoteView).machine_usd == 0


def test_a_cluster_costs_from_the_moment_it_is_asked_for(new):
    class Slow(Host):
        def provision(self) -> None:
            # What it has cost by now is known to whoever follows the run next.
            assert read_record(new).used_since is not None
            super().provision()

    host = Slow(start=[MachineGoneError("-", "-")])
    follow(new, host)
    assert host.calls == ["provision", "prepare", "start", "remove", "release"]

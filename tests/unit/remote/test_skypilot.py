"""A cluster that SkyPilot brings up is put down again, whenever our side is killed."""

import io
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.moments import KilledError, Moments
from fakes.sky_cloud import EXCEPTIONS, PRICE, ScriptedCloud
from stillroom.errors import EngineError, MissingExtraError
from stillroom.files import write_json
from stillroom.remote.channel import LocalChannel, PipedProcess
from stillroom.remote.frames import Frames
from stillroom.remote.host import MachineGoneError, UnreachableError
from stillroom.remote.machine import Machine, SkyPilotCluster, SshAddress
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.providers.sky_calls import SkyCalls, SkyProcess, hold_script
from stillroom.remote.providers.skypilot import SkyPilotHost
from stillroom.remote.records import LaunchRequest
from stillroom.run_folder import VIEW_FILE, RemoteView

MACHINE = Machine(
    name="sky-h100",
    skypilot=SkyPilotCluster(resources={"accelerators": "H100:1", "use_spot": True}, autostop=10),
)


def replies() -> bytes:
    """What an agent writes that has nothing to say."""
    frames = Frames(io.BytesIO(), sink := io.BytesIO())
    frames.begin()
    frames.end()
    return sink.getvalue()


class ClusterChannel(LocalChannel):
    """A connection to a cluster that is up: each command ends well."""

    def __init__(self, address: SshAddress, cloud: ScriptedCloud, moments: Moments) -> None:
        super().__init__()
        self._address, self._cloud, self._moments = address, cloud, moments

    def open(self) -> PipedProcess:
        cluster = self._cloud.clusters.get(self._address.host)
        if cluster is None or cluster.status != "UP":
            raise UnreachableError("no answer", "wait")
        with self._moments.around():
            pass
        return PipedProcess(["sh", "-c", f"printf %b '{REPLIES}'; cat >/dev/null"])


REPLIES = "".join(f"\\0{byte:03o}" for byte in replies())


class Life:
    """Processes of ours, one after another, with one provision log and one cloud."""

    def __init__(self, tmp_path: Path) -> None:
        self.cloud, self.log = ScriptedCloud(), ProvisionLog(tmp_path / "state")
        self.run = self.new_run(tmp_path / "work" / "runs" / "sft-one")
        self.pauses: list[float] = []

    def new_run(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        return folder

    def host(
        self, run: Path | None = None, *, moments: Moments | None = None, machine: Machine = MACHINE
    ) -> SkyPilotHost:
        moments = moments or Moments()
        return SkyPilotHost(
            machine,
            run or self.run,
            calls=SkyCalls(
                self.cloud.package(moments), cli=lambda arguments: None, pause=self.pauses.append
            ),
            provision_log=self.log,
            open_channel=lambda _name, address: ClusterChannel(address, self.cloud, moments),
            python="python3",
        )

    def whole_run(self, *, moments: Moments | None = None) -> None:
        """Does what the follower of a run does with its machine."""
        host = self.host(moments=moments)
        host.provision()
        host.start(start_of(self.run))
        list(host.follow(self.run.name, {}))
        host.release()
        host.close()


def start_of(run: Path) -> LaunchRequest:
    return LaunchRequest(
        run_id=run.name, files=[], home_paths=[], home_root="/", request=b"", max_hours=1
    )


def say(run: Path, phase: Any) -> None:
    write_json(run / VIEW_FILE, RemoteView(where="sky-h100", phase=phase))


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


MAX_MOMENTS = 34


def test_a_run_brings_its_cluster_up_with_the_belt_on_and_puts_it_down(life):
    host = life.host()
    host.provision()
    (cluster,) = life.cloud.clusters.values()
    assert cluster.belt == (10, True)
    assert [entry.name for entry in life.log.entries()] == [host.name]
    host.start(start_of(life.run))
    host.release()
    assert not life.cloud.clusters
    assert not life.log.entries()


@pytest.mark.parametrize("moment", range(1, MAX_MOMENTS + 1))
def test_a_follower_killed_at_any_moment_leaves_nothing_up_once_it_was_started_again(life, moment):
    try:
        life.whole_run(moments=Moments(kill_at=moment))
    except KilledError:
        # Whatever is up is on the list, so that somebody knows of it.
        assert set(life.cloud.clusters) <= {entry.name for entry in life.log.entries()}
        try:
            life.whole_run()
        except MachineGoneError:
            # It had been put down already.
            life.host().release()
    assert not life.cloud.clusters
    assert not life.log.entries()
    assert life.cloud.launched == 1


@pytest.mark.parametrize("seed", range(4))
def test_followers_killed_one_after_another_leave_nothing_up_in_the_end(life, seed):
    draw = random.Random(seed)
    for _ in range(draw.randrange(2, 7)):
        # Sometimes its machine is taken away between two followers.
        if draw.random() < 0.1:
            life.cloud.clusters.clear()
        try:
            life.whole_run(moments=Moments(kill_at=draw.randrange(1, MAX_MOMENTS)))
        except KilledError:
            assert set(life.cloud.clusters) <= {entry.name for entry in life.log.entries()}
        except MachineGoneError:
            life.host().release()
            break
    try:
        life.whole_run()
    except MachineGoneError:
        life.host().release()
    assert not life.cloud.clusters
    assert not life.log.entries()


def test_every_moment_of_a_run_is_tried(life):
    moments = Moments()
    life.whole_run(moments=moments)
    assert moments.passed == MAX_MOMENTS


@pytest.mark.parametrize("moment", range(1, MAX_MOMENTS + 1))
def test_a_side_killed_for_good_leaves_nothing_up_after_the_clusters_own_belt(life, moment):
    try:
        life.whole_run(moments=Moments(kill_at=moment))
    except KilledError:
        life.cloud.let_time_pass()
    assert not life.cloud.clusters


@pytest.mark.parametrize("moment", range(1, MAX_MOMENTS + 1))
def test_what_a_deleted_run_left_up_is_put_down_by_whoever_looks_next(life, moment):
    try:
        life.whole_run(moments=Moments(kill_at=moment))
    except KilledError:
        shutil.rmtree(life.run)
        SkyPilotHost.release(life.host(life.run.with_name("another")))
    assert not life.cloud.clusters


def test_a_cluster_stays_while_another_run_is_on_it(life):
    other = life.new_run(life.run.with_name("sft-two"))
    first, second = life.host(), life.host(other)
    first.provision()
    second.provision()
    assert first.name == second.name
    assert life.cloud.launched == 1
    first.release()
    assert list(life.cloud.clusters) == [first.name]
    second.release()
    assert not life.cloud.clusters


def test_waiting_for_a_cluster_gives_way_every_20_seconds_and_asks_for_it_once(life):
    life.cloud.slow = 25
    with pytest.raises(UnreachableError, match="still provisioning"):
        life.host().provision()
    assert sum(life.pauses) == 20
    for cluster in life.cloud.clusters.values():
        cluster.status = "INIT"
    with pytest.raises(UnreachableError):
        life.host().provision()
    life.cloud.slow = 0
    life.host().provision()
    assert life.cloud.launched == 1
    assert life.cloud.calls.count("launch") == 1


def test_a_launch_that_fails_is_put_down_and_says_what_to_do(life):
    life.cloud.failing["launch"] = EXCEPTIONS.ResourcesUnavailableError("\x1b[31mno H100\x1b[0m")
    with pytest.raises(EngineError, match="no provider has these resources available: no H100"):
        life.host().provision()
    assert not life.cloud.clusters
    assert not life.log.entries()


def test_a_failed_launch_does_not_take_the_machine_of_another_run(life):
    other = life.new_run(life.run.with_name("sft-two"))
    life.host(other).provision()
    for cluster in life.cloud.clusters.values():
        cluster.status = "INIT"
    life.cloud.failing["launch"] = EXCEPTIONS.ResourcesUnavailableError("no H100")
    with pytest.raises(EngineError, match="no H100"):
        life.host().provision()
    assert life.cloud.clusters


def test_a_spot_machine_that_was_taken_back_is_gone_and_not_brought_up_anew(life):
    host = life.host()
    host.provision()
    host.start(start_of(life.run))
    life.cloud.clusters.clear()
    with pytest.raises(MachineGoneError, match="no longer exists"):
        list(host.follow(life.run.name, {}))
    with pytest.raises(MachineGoneError, match="no longer exists"):
        life.host().provision()
    assert life.cloud.launched == 1
    life.host().release()
    assert not life.log.entries()


def test_a_cluster_that_does_not_answer_is_not_gone(life):
    host = life.host()
    host.provision()
    (cluster,) = life.cloud.clusters.values()
    cluster.status = "INIT"
    with pytest.raises(UnreachableError):
        list(host.follow(life.run.name, {}))


def test_a_cluster_that_cannot_be_put_down_stays_on_the_list(life):
    host = life.host()
    host.provision()
    life.cloud.failing["down"] = RuntimeError("the cloud is away")
    with pytest.raises(UnreachableError, match="could not delete"):
        host.release()
    (entry,) = life.log.entries()
    assert entry.release_command == f"sky down -y {host.name}"
    del life.cloud.failing["down"]
    host.release()
    assert not life.log.entries()


def test_the_price_is_the_files_or_else_what_skypilot_says(life):
    host = life.host()
    host.provision()
    assert host.price_per_hour() == PRICE
    own = msgspec.structs.replace(MACHINE, price_per_hour=9.0)
    assert life.host(machine=own).price_per_hour() == 9.0


def test_a_cluster_that_is_not_up_has_the_price_and_hardware_of_the_cheapest_offer(life):
    host = life.host()
    facts = host.facts()
    assert "AWS type" in facts.system
    assert (facts.gpus, facts.gpu_memory_gb) == (["H100"], [79.7])
    assert (facts.num_processors, facts.memory_gb) == (26, 200.0)
    # Lambda has no spot machines, and GCP was not set up.
    assert host.price_per_hour() == PRICE
    resources = {"accelerators": {"H100": 1}, "infra": "lambda"}
    other = Machine(name="sky", skypilot=SkyPilotCluster(resources=resources))
    assert life.host(machine=other).price_per_hour() == 3.0
    assert not life.cloud.clusters
    assert not life.log.entries()


def test_without_an_accelerator_the_price_is_known_only_when_the_cluster_is_up(life):
    plain = Machine(name="sky", skypilot=SkyPilotCluster(resources={"cpus": "8+"}))
    host = life.host(machine=plain)
    assert host.facts().gpus == []
    assert host.price_per_hour() is None
    host.provision()
    assert host.price_per_hour() == PRICE


def test_without_a_cloud_the_command_that_sets_one_up_is_named(life):
    life.cloud.enabled = []
    with pytest.raises(EngineError) as caught:
        life.host().facts()
    assert "sky check" in caught.value.fix


def test_resources_that_skypilot_does_not_take_are_named(life):
    wrong = Machine(name="sky", skypilot=SkyPilotCluster(resources={"accelerator": "H100"}))
    with pytest.raises(EngineError, match="Invalid resources YAML: accelerator"):
        life.host(machine=wrong).provision()
    assert not life.cloud.clusters


def test_without_the_package_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"stillroom\[sky\]"):
        SkyCalls()


def test_the_job_that_keeps_a_cluster_up_lasts_as_long_as_something_of_ours(tmp_path):
    folder = tmp_path / "kept-there"
    folder.mkdir()
    # Other tests may run the programs at the same time.
    script = hold_script(str(folder), programs=(), check_every_s=0.05, num_idle_checks=2)
    # Its own text in a command line must not keep it up.
    assert subprocess.run(["/bin/sh", "-c", script], timeout=20, check=False).returncode == 0
    ours = subprocess.Popen([sys.executable, "-c", "input()", f"{folder}/x"], stdin=subprocess.PIPE)
    held = subprocess.Popen(["/bin/sh", "-c", script])
    time.sleep(0.5)
    assert held.poll() is None
    ours.communicate(b"\n", timeout=20)
    assert held.wait(20) == 0


def test_what_skypilot_prints_does_not_reach_standard_output(tmp_path, monkeypatch, capfd):
    package = tmp_path / "sky"
    package.mkdir()
    (package / "__init__.py").write_text(
        """
import os
from types import SimpleNamespace
exceptions = SimpleNamespace(**{
    name: type(name, (Exception,), {})
    for name in ("ClusterDoesNotExist", "NoCloudAccessError", "ResourcesUnavailableError")
})
def down(cluster_name):
    print("Terminating", cluster_name)
    os.system("echo and its program")
    if cluster_name == "away":
        raise OSError("no network")
    return "request"
def get(request_id):
    raise exceptions.ClusterDoesNotExist(request_id)
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    calls = SkyProcess()
    calls.call(SkyCalls.release, "one")
    with pytest.raises(UnreachableError, match="no network"):
        calls.call(SkyCalls.release, "away")
    assert capfd.readouterr().out == ""

"""Whole runs on rented machines: the provider is scripted, follower and run are real."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.hub import FLAVOR, ScriptedHub
from fakes.local_follower import CutChannel, PreparedHost
from fakes.rollout_rows import read_rows
from fakes.runs_elsewhere import Elsewhere
from fakes.sky_cloud import ScriptedCloud
from fakes.waiting import wait_until
from stillroom.remote.channel import LocalChannel
from stillroom.remote.follower.follower import Follower
from stillroom.remote.machine import HfJobsFlavor, Machine, SkyPilotCluster
from stillroom.remote.providers.hf_bucket import (
    BUCKET_VARIABLE,
    RUN_VARIABLE,
    SECRETS_VARIABLE,
    START_VARIABLE,
    Bucket,
    code_path,
)
from stillroom.remote.providers.hf_job_program import JobProgram
from stillroom.remote.providers.hf_jobs import HfJobsHost
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.providers.sky_calls import SkyCalls
from stillroom.remote.providers.skypilot import SkyPilotHost
from stillroom.remote.ssh.bootstrap import code_hash
from stillroom.run_folder import RunFolder
from stillroom.secrecy.environments import bare_environment

SECRET = "sk-teacher-0123456789"


class Service:
    """The scripted hub, and a thread for each of its jobs."""

    def __init__(self, there: Path, python: Path) -> None:
        self.hub, self._there, self._python = ScriptedHub(), there, python
        self.hub.files[f"me/stillroom-runs/{code_path(code_hash())}"] = b"code"
        self._threads: list[threading.Thread] = []

    def pause(self, _seconds: float) -> None:
        """Our side waits: the service starts what is to be started."""
        for job in self.hub.jobs.values():
            if job.stage == "SCHEDULING":
                job.stage = "RUNNING"
                self._threads.append(threading.Thread(target=self._do, args=(job,), daemon=True))
                self._threads[-1].start()
        time.sleep(0.05)

    def join_threads(self) -> None:
        for thread in self._threads:
            thread.join(30)

    def _do(self, job: Any) -> None:
        variables = job.asked["env"]
        side = JobProgram(
            Bucket(self.hub.api(), variables[BUCKET_VARIABLE]),
            variables[RUN_VARIABLE],
            start=variables[START_VARIABLE],
            secrets=msgspec.json.decode(job.asked["secrets"][SECRETS_VARIABLE]),
            post_every_s=0.1,
        )
        machine = Machine(name="in the job", folder=str(self._there))
        channel = LocalChannel(environment=bare_environment())
        is_done = side.run(
            lambda _packages: PreparedHost(machine, channel, python=str(self._python))
        )
        job.stage = "COMPLETED" if is_done else "ERROR"


SKY = Machine(name="sky", skypilot=SkyPilotCluster(resources={"cpus": 4, "use_spot": True}))


def cluster_host(
    elsewhere: Elsewhere, cloud: ScriptedCloud, run: RunFolder, python: Path
) -> SkyPilotHost:
    """Returns the host of a cluster whose disk is the other machine's folder."""
    channel = CutChannel(elsewhere.there / "cut")
    return SkyPilotHost(
        msgspec.structs.replace(SKY, folder=str(elsewhere.there)),
        run.path,
        calls=SkyCalls(cloud.package(), cli=lambda arguments: None),
        provision_log=ProvisionLog(elsewhere.root / "state"),
        open_channel=lambda _name, _address: channel,
        python=str(python),
    )


def test_a_run_on_a_cluster_comes_back_and_the_cluster_goes_down(
    tmp_path: Path, warm_program: Path
) -> None:
    elsewhere, cloud = Elsewhere(tmp_path), ScriptedCloud()
    elsewhere.open()
    run, spec = elsewhere.spec(SKY)
    host = cluster_host(elsewhere, cloud, run, warm_program)
    Follower(run, spec, host, {}).run()
    ended = elsewhere.report(run)
    assert ended.status == "succeeded", ended.error
    assert [row["reward"] for row in read_rows(elsewhere.home / "scored.jsonl")] == [0.0, 0.1]
    assert ended.machine_usd is not None
    assert ended.machine_usd > 0
    assert cloud.launched == 1
    assert not cloud.clusters
    assert not ProvisionLog(tmp_path / "state").entries()


@pytest.mark.thorough  # its processes begin in a thread, where --quick cannot skip it
def test_a_spot_machine_that_is_taken_back_leaves_its_checkpoints_here(tmp_path: Path) -> None:
    elsewhere, cloud = Elsewhere(tmp_path), ScriptedCloud()
    run, spec = elsewhere.spec(SKY)
    # With its machine all that talks goes, which a warm program would outlive.
    host = cluster_host(elsewhere, cloud, run, Path(sys.executable))
    following = threading.Thread(target=Follower(run, spec, host, {}).run, daemon=True)
    following.start()
    checkpoint = run.path / "checkpoints" / "step_000000" / "model.safetensors"
    wait_until(checkpoint.exists, timeout_s=60)
    cloud.clusters.clear()
    elsewhere.cut()
    following.join(60)
    ended = run.read()
    assert ended.status == "interrupted"
    assert ended.error is not None
    assert "no longer exists (a spot machine" in ended.error.problem
    assert checkpoint.read_bytes() == bytes([0]) * 1000
    assert cloud.launched == 1
    assert not cloud.clusters
    assert not ProvisionLog(tmp_path / "state").entries()
    elsewhere.close()


def test_a_run_in_a_job_leaves_here_what_a_run_here_leaves(
    tmp_path: Path, warm_program: Path
) -> None:
    elsewhere = Elsewhere(tmp_path)
    elsewhere.open()
    service = Service(elsewhere.there, warm_program)
    run, spec = elsewhere.spec(Machine(name="hf", hf_jobs=HfJobsFlavor(flavor=FLAVOR)))
    provision_log = ProvisionLog(tmp_path / "state")
    host = HfJobsHost(
        spec.machine,
        run.path,
        api=service.hub.api(),
        token="hf_own",  # noqa: S106
        provision_log=provision_log,
        pause=service.pause,
    )
    Follower(run, spec, host, {"KEY": SECRET}, sleep=lambda seconds: time.sleep(0.01)).run()
    service.join_threads()

    ended = elsewhere.report(run)
    assert ended.status == "succeeded", ended.error
    assert [row["reward"] for row in read_rows(elsewhere.home / "scored.jsonl")] == [0.0, 0.1]
    weights = run.path / "checkpoints" / "step_000001" / "model.safetensors"
    assert weights.read_bytes() == bytes([1]) * 1000
    assert f"begin 1 {elsewhere.home}\n" in run.log.read_text()
    assert (
        str(elsewhere.home / "rollouts.jsonl")
        in (elsewhere.home / "scored.jsonl.manifest.json").read_text()
    )
    assert ended.machine_usd is not None
    assert not service.hub.costing
    assert not provision_log.entries()
    assert SECRET.encode() not in b"".join(service.hub.files.values())
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in texts)

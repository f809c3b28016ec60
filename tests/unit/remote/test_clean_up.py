"""What no run needs is put down by whoever looks next, in whatever workspace the run was."""

import shutil
from pathlib import Path

import pytest

from stillroom.errors import DataError
from stillroom.files import write_json
from stillroom.remote.host import UnreachableError
from stillroom.remote.machine import HfJobsFlavor, Machine, SkyPilotCluster
from stillroom.remote.providers.clean_up import clean_up
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.records import RemoteView
from stillroom.run_folder import VIEW_FILE

SKY = Machine(name="sky", skypilot=SkyPilotCluster(resources={"accelerators": "H100:1"}))
JOB = Machine(name="hf", hf_jobs=HfJobsFlavor(flavor="a10g-large"))


@pytest.fixture
def provision_log(tmp_path: Path) -> ProvisionLog:
    return ProvisionLog(tmp_path / "state")


def a_run(tmp_path: Path, name: str, *, phase: str = "running", workspace: str = "work") -> Path:
    run = tmp_path / workspace / "runs" / name
    run.mkdir(parents=True)
    write_json(run / VIEW_FILE, RemoteView(where="sky", phase=phase))
    return run


def provision(provision_log: ProvisionLog, name: str, *runs: Path, machine: Machine = SKY) -> None:
    with provision_log.holding(name) as held:
        for run in runs:
            held.add(machine, name, run)


def cleaned(provision_log: ProvisionLog, *, failing: bool = False) -> tuple[list[str], list[str]]:
    """Returns what was put down, and what is left."""
    done = []

    def release(entry, _log):
        done.append(entry.name)
        if failing:
            raise UnreachableError("the cloud is away", "wait")

    return done, clean_up(provision_log, release)


def test_only_what_no_run_needs_is_put_down(tmp_path, provision_log):
    provision(provision_log, "one", a_run(tmp_path, "sft-1", phase="over"))
    provision(
        provision_log, "two", a_run(tmp_path, "sft-2", phase="over"), a_run(tmp_path, "sft-3")
    )
    provision(provision_log, "three", a_run(tmp_path, "sft-4"), machine=JOB)
    deleted = a_run(tmp_path, "sft-5")
    provision(provision_log, "four", deleted, machine=JOB)
    shutil.rmtree(deleted)
    assert cleaned(provision_log) == (["one", "four"], [])


def test_a_run_that_has_not_begun_keeps_its_machine(tmp_path, provision_log):
    run = tmp_path / "work" / "runs" / "sft-1"
    run.mkdir(parents=True)
    provision(provision_log, "one", run)
    assert cleaned(provision_log) == ([], [])


def test_a_machine_is_named_as_long_as_it_could_not_be_put_down(tmp_path, provision_log, capsys):
    provision(provision_log, "one", a_run(tmp_path, "sft-1", phase="over"))
    assert cleaned(provision_log, failing=True) == (["one"], ["one"])
    assert "the cloud is away" in capsys.readouterr().err
    assert [entry.name for entry in provision_log.entries()] == ["one"]


def test_a_run_in_a_workspace_that_is_away_keeps_its_machine(tmp_path, provision_log):
    run = a_run(tmp_path, "sft-1", workspace="disk")
    provision(provision_log, "one", run)
    shutil.rmtree(tmp_path / "disk")
    assert cleaned(provision_log) == ([], [])


def test_a_damaged_entry_is_named_since_it_may_cost_money(tmp_path, provision_log):
    provision(provision_log, "one", a_run(tmp_path, "sft-1"))
    (tmp_path / "state" / "one.json").write_text("{")
    with pytest.raises(DataError, match=r"one\.json is damaged") as caught:
        provision_log.entries()
    assert "sky status" in caught.value.fix


def test_each_entry_says_how_it_is_put_down_by_hand(tmp_path, provision_log):
    provision(provision_log, "stillroom-sky-1", a_run(tmp_path, "sft-1"))
    provision(provision_log, "stillroom-sft-2", a_run(tmp_path, "sft-2"), machine=JOB)
    cluster, job = (provision_log.find(name) for name in ("stillroom-sky-1", "stillroom-sft-2"))
    assert cluster.release_command == "sky down -y stillroom-sky-1"
    assert "hf jobs ps" in job.release_command
    with provision_log.holding(job.name) as held:
        held.update(request_id="job7")
    assert provision_log.find(job.name).release_command == "hf jobs cancel job7"


def test_two_logs_never_share_the_name_of_a_cluster(tmp_path):
    first, second = ProvisionLog(tmp_path / "a"), ProvisionLog(tmp_path / "b")
    assert first.identity == ProvisionLog(tmp_path / "a").identity
    assert first.identity != second.identity

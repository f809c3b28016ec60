"""What no run needs is put down by whoever looks next, in whatever workspace the run was."""

import shutil
from pathlib import Path

import pytest

from stillroom.errors import DataError
from stillroom.files import write_json
from stillroom.remote.host import UnreachableError
from stillroom.remote.records import HfJobsFlavor, Machine, SkyPilotCluster, View
from stillroom.remote.rented.clean_up import clean_up
from stillroom.remote.rented.ledger import Ledger
from stillroom.run_folder import VIEW_FILE

SKY = Machine(name="sky", skypilot=SkyPilotCluster(resources={"accelerators": "H100:1"}))
JOB = Machine(name="hf", hf_jobs=HfJobsFlavor(flavor="a10g-large"))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state")


def a_run(tmp_path: Path, name: str, *, phase: str = "running", workspace: str = "work") -> Path:
    run = tmp_path / workspace / "runs" / name
    run.mkdir(parents=True)
    write_json(run / VIEW_FILE, View(where="sky", phase=phase))
    return run


def bring_up(ledger: Ledger, name: str, *runs: Path, machine: Machine = SKY) -> None:
    with ledger.holding(name) as held:
        for run in runs:
            held.add(machine, name, run)


def cleaned(ledger: Ledger, *, failing: bool = False) -> tuple[list[str], list[str]]:
    """Returns what was put down, and what is left."""
    done = []

    def put_down(entry, _ledger):
        done.append(entry.name)
        if failing:
            raise UnreachableError("the cloud is away", "wait")

    return done, clean_up(ledger, put_down)


def test_only_what_no_run_needs_is_put_down(tmp_path, ledger):
    bring_up(ledger, "one", a_run(tmp_path, "sft-1", phase="over"))
    bring_up(ledger, "two", a_run(tmp_path, "sft-2", phase="over"), a_run(tmp_path, "sft-3"))
    bring_up(ledger, "three", a_run(tmp_path, "sft-4"), machine=JOB)
    deleted = a_run(tmp_path, "sft-5")
    bring_up(ledger, "four", deleted, machine=JOB)
    shutil.rmtree(deleted)
    assert cleaned(ledger) == (["one", "four"], [])


def test_a_run_that_has_not_begun_keeps_its_machine(tmp_path, ledger):
    run = tmp_path / "work" / "runs" / "sft-1"
    run.mkdir(parents=True)
    bring_up(ledger, "one", run)
    assert cleaned(ledger) == ([], [])


def test_a_machine_is_named_as_long_as_it_could_not_be_put_down(tmp_path, ledger, capsys):
    bring_up(ledger, "one", a_run(tmp_path, "sft-1", phase="over"))
    assert cleaned(ledger, failing=True) == (["one"], ["one"])
    assert "the cloud is away" in capsys.readouterr().err
    assert [entry.name for entry in ledger.entries()] == ["one"]


def test_a_run_in_a_workspace_that_is_away_keeps_its_machine(tmp_path, ledger):
    run = a_run(tmp_path, "sft-1", workspace="disk")
    bring_up(ledger, "one", run)
    shutil.rmtree(tmp_path / "disk")
    assert cleaned(ledger) == ([], [])


def test_a_damaged_entry_is_named_since_it_may_cost_money(tmp_path, ledger):
    bring_up(ledger, "one", a_run(tmp_path, "sft-1"))
    (tmp_path / "state" / "one.json").write_text("{")
    with pytest.raises(DataError, match=r"one\.json is damaged") as caught:
        ledger.entries()
    assert "sky status" in caught.value.fix


def test_each_entry_says_how_it_is_put_down_by_hand(tmp_path, ledger):
    bring_up(ledger, "stillroom-sky-1", a_run(tmp_path, "sft-1"))
    bring_up(ledger, "stillroom-sft-2", a_run(tmp_path, "sft-2"), machine=JOB)
    cluster, job = (ledger.find(name) for name in ("stillroom-sky-1", "stillroom-sft-2"))
    assert cluster.put_down_command == "sky down -y stillroom-sky-1"
    assert "hf jobs ps" in job.put_down_command
    with ledger.holding(job.name) as held:
        held.update(request_id="job7")
    assert ledger.find(job.name).put_down_command == "hf jobs cancel job7"


def test_two_ledgers_never_share_the_name_of_a_cluster(tmp_path):
    first, second = Ledger(tmp_path / "a"), Ledger(tmp_path / "b")
    assert first.identity == Ledger(tmp_path / "a").identity
    assert first.identity != second.identity

"""list_machines, and the process that releases what no run needs."""

import shutil
import threading
from pathlib import Path

import pytest

from fakes.machines import GPU_BOX, ScriptedMachines, add_remote_run, name_machines
from stillroom.errors import DataError
from stillroom.files import write_json
from stillroom.lineage import now
from stillroom.remote.host import UnreachableError
from stillroom.remote.hosts import release_machine
from stillroom.remote.machine import HfJobsFlavor, Machine, SkyPilotCluster
from stillroom.remote.machine_list import ListMachines, list_machines, probe_all
from stillroom.remote.machines import find_machine
from stillroom.remote.providers.clean_up import clean_up
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.records import MachineFacts
from stillroom.run_folder import VIEW_FILE, RemoteView
from stillroom.settings import Workspace

TWO = """
gpu-box: {ssh: me@host, price_per_hour: 2.40}
sky: {skypilot: {accelerators: "A100-80GB:2", use_spot: true}}
"""
NOBODY = ScriptedMachines({})


@pytest.fixture
def provision_log(tmp_path):
    return ProvisionLog(tmp_path / "provision_log")


def listed(workspace, provision_log, *, check=False, open_machine=NOBODY, release=None):
    return list_machines(
        workspace,
        ListMachines(check=check),
        open_machine=open_machine,
        provision_log=provision_log,
        release=release or (lambda _log: pytest.fail("a run needs it")),
    )


def test_without_a_check_nobody_is_asked(tmp_path, provision_log):
    found = listed(name_machines(tmp_path, TWO), provision_log)

    box, sky = found.machines
    assert (box.kind, box.address, box.state) == ("ssh", "me@host", "not_asked")
    assert (box.price_per_hour, box.usd_per_hour_now, box.runs) == (2.4, None, [])
    assert box.computes == "hardware not known yet"
    assert (sky.kind, sky.state, sky.computes) == ("skypilot", "down", "2 x A100-80GB")
    assert sky.usd_per_hour_now == 0.0
    assert "use_spot: True" in sky.address
    # That nothing costs would be a guess.
    assert found.usd_per_hour_now is None


def test_a_run_shows_where_it_stands_and_what_its_machine_costs(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    view = RemoteView(where="gpu-box", phase="running", last_contact=now(), machine_usd=0.75)
    run = add_remote_run(workspace, view)
    over = RemoteView(where="gpu-box", phase="over", machine_usd=1.0, release_usd=0.25)
    add_remote_run(workspace, over)

    box = listed(workspace, provision_log).machines[0]

    assert box.state == "in_use"
    assert [(one.run_id, one.phase) for one in box.runs] == [(run.run_id, "running")]
    assert box.spent_usd == pytest.approx(2.0)
    assert box.usd_per_hour_now == 2.4


def test_a_machine_of_the_user_costs_while_it_answers_and_only_they_know_otherwise(
    tmp_path, provision_log
):
    machines = "gpu-box: {ssh: me@host, price_per_hour: 2.40}\nfar: {ssh: far, price_per_hour: 1}\n"
    workspace = name_machines(tmp_path, machines + "own: {ssh: own, price_per_hour: 0}\n")
    away = UnreachableError("it is not up", "-")
    open_machine = ScriptedMachines({"gpu-box": GPU_BOX, "far": away, "own": away})

    found = listed(workspace, provision_log, check=True, open_machine=open_machine)

    assert [machine.usd_per_hour_now for machine in found.machines] == [2.4, None, 0.0]
    assert found.usd_per_hour_now == 2.4


def test_a_run_that_waits_does_not_use_its_machine_yet(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    add_remote_run(workspace, None)

    box = listed(workspace, provision_log).machines[0]

    assert (box.state, box.usd_per_hour_now) == ("not_asked", None)
    assert [one.phase for one in box.runs] == ["waiting"]


def test_a_problem_of_a_run_is_that_of_its_machine(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    add_remote_run(
        workspace, RemoteView(where="gpu-box", phase="running", problem="no route (wait)")
    )

    silent = listed(workspace, provision_log).machines[0]

    assert (silent.state, silent.problem) == ("unreachable", "no route (wait)")
    # It goes on there, and costs.
    assert silent.usd_per_hour_now == 2.4


def test_a_check_asks_each_machine_once_and_keeps_what_it_answers(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO + "far: {ssh: far}\n")
    silent = UnreachableError("far does not answer", "look at its network")
    planned = MachineFacts(system="a cluster that is not up", gpus=["A100-80GB:2"])
    open_machine = ScriptedMachines({"gpu-box": GPU_BOX, "far": silent, "sky": planned})

    box, sky, far = listed(workspace, provision_log, check=True, open_machine=open_machine).machines

    assert sorted(open_machine.asked) == ["far", "gpu-box", "sky"]
    assert open_machine.num_open == 0
    assert (box.state, box.computes) == ("answers", "NVIDIA H100 80GB HBM3")
    assert (box.gpu_memory_gb, box.free_disk_gb) == ([79.6], 500.0)
    assert (far.state, far.problem) == ("unreachable", "far does not answer (look at its network)")
    # Nobody knows yet which machine it will be, but which GPUs it will have.
    assert (sky.state, sky.computes, sky.asked_at) == ("down", "2 x A100-80GB", None)
    again = listed(workspace, provision_log).machines[0]
    assert (again.computes, again.asked_at is None) == ("NVIDIA H100 80GB HBM3", False)


def test_another_address_under_the_same_name_is_another_machine(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    away = UnreachableError("it is not up", "-")
    open_machine = ScriptedMachines({"gpu-box": GPU_BOX, "sky": away})
    assert (
        listed(workspace, provision_log, check=True, open_machine=open_machine).machines[1].state
        == "down"
    )

    changed = name_machines(tmp_path, TWO.replace("me@host", "me@other"))

    assert listed(changed, provision_log).machines[0].computes == "hardware not known yet"


def test_a_machine_that_never_answers_is_not_waited_for(tmp_path):
    machine = find_machine(name_machines(tmp_path, TWO), "gpu-box")
    free = threading.Event()

    class Hanging(ScriptedMachines):
        def __call__(self, machine):
            free.wait(30)
            return super().__call__(machine)

    workspace = Workspace(tmp_path)
    answer = probe_all(workspace, [machine], Hanging({"gpu-box": GPU_BOX}), timeout_s=0.05)[
        "gpu-box"
    ]
    free.set()

    assert "timed out after 0.05 s" in str(answer)


def test_what_is_up_without_a_run_costs_and_says_how_to_put_it_down(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    sky = find_machine(workspace, "sky")
    run = add_remote_run(workspace, RemoteView(where="sky", phase="running"), machine=sky)
    with provision_log.lock_entry("stillroom-sky") as held:
        held.add(sky, "stillroom-sky", run.path)
        held.update(request_id=None, price_per_hour=3.2)

    busy = listed(workspace, provision_log)
    assert (busy.machines[1].state, busy.usd_per_hour_now) == ("in_use", 3.2)
    assert busy.machines[1].problem is None

    with provision_log.lock_entry("stillroom-sky") as held:
        held.drop_run(run.path)
    (run.path / "remote_view.json").write_bytes(b'{"where": "sky", "phase": "over"}')

    # Its entry is gone, and it costs all the same.
    release = []
    left = listed(name_machines(tmp_path, ""), provision_log, release=release.append)
    assert release == [provision_log]
    assert [(one.name, one.state) for one in left.machines] == [("sky", "up")]
    assert left.usd_per_hour_now == 3.2
    assert "sky down -y stillroom-sky" in (left.machines[0].problem or "")


def test_what_a_provider_lists_of_a_machine_that_is_not_up_is_known(tmp_path, provision_log):
    workspace = name_machines(tmp_path, "hub: {hf_jobs: a10g-largex4}\n")
    listing = MachineFacts(
        system="a job of Hugging Face",
        num_processors=48,
        gpus=["4 x Nvidia A10G, 96 GB in total"],
        gpu_memory_gb=[24.0] * 4,
    )
    open_machine = ScriptedMachines({"hub": listing}, price_per_hour=5.0)

    hub = listed(workspace, provision_log, check=True, open_machine=open_machine).machines[0]

    assert (hub.state, hub.computes, hub.usd_per_hour_now) == ("down", "4 x Nvidia A10G", 0.0)
    assert (hub.price_per_hour, hub.gpu_memory_gb) == (5.0, [24.0] * 4)
    assert listed(workspace, provision_log).machines[0].price_per_hour == 5.0


SKY = Machine(name="sky", skypilot=SkyPilotCluster(resources={"accelerators": "H100:1"}))
JOB = Machine(name="hf", hf_jobs=HfJobsFlavor(flavor="a10g-large"))


def a_run(tmp_path: Path, name: str, *, phase: str = "running", workspace: str = "work") -> Path:
    run = tmp_path / workspace / "runs" / name
    run.mkdir(parents=True)
    write_json(run / VIEW_FILE, RemoteView(where="sky", phase=phase))
    return run


def provision(provision_log: ProvisionLog, name: str, *runs: Path, machine: Machine = SKY) -> None:
    with provision_log.lock_entry(name) as held:
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


def test_a_machine_of_a_kind_that_is_not_known_is_named_and_never_released_as_another(
    tmp_path, provision_log, capsys
):
    later = Machine(name="later")  # as an older version reads the entry of a newer one
    provision(provision_log, "one", a_run(tmp_path, "sft-1", phase="over"), machine=later)
    assert clean_up(provision_log, release_machine) == ["one"]
    assert "kind of machine that this version does not support" in capsys.readouterr().err
    assert [entry.name for entry in provision_log.entries()] == ["one"]


def test_a_run_in_a_workspace_that_is_away_keeps_its_machine(tmp_path, provision_log):
    run = a_run(tmp_path, "sft-1", workspace="disk")
    provision(provision_log, "one", run)
    shutil.rmtree(tmp_path / "disk")
    assert cleaned(provision_log) == ([], [])


def test_a_damaged_entry_is_named_since_it_may_cost_money(tmp_path, provision_log):
    provision(provision_log, "one", a_run(tmp_path, "sft-1"))
    (tmp_path / "provision_log" / "one.json").write_text("{")
    with pytest.raises(DataError, match=r"one\.json is damaged") as caught:
        provision_log.entries()
    assert "sky status" in caught.value.fix


def test_each_entry_says_how_it_is_put_down_by_hand(tmp_path, provision_log):
    provision(provision_log, "stillroom-sky-1", a_run(tmp_path, "sft-1"))
    provision(provision_log, "stillroom-sft-2", a_run(tmp_path, "sft-2"), machine=JOB)
    cluster, job = (provision_log.find(name) for name in ("stillroom-sky-1", "stillroom-sft-2"))
    assert cluster.release_command == "sky down -y stillroom-sky-1"
    assert "hf jobs ps" in job.release_command
    with provision_log.lock_entry(job.name) as held:
        held.update(request_id="job7")
    assert provision_log.find(job.name).release_command == "hf jobs cancel job7"


def test_two_logs_never_share_the_name_of_a_cluster(tmp_path):
    first, second = ProvisionLog(tmp_path / "a"), ProvisionLog(tmp_path / "b")
    assert first.identity == ProvisionLog(tmp_path / "a").identity
    assert first.identity != second.identity

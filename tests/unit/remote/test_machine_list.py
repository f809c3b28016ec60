"""list_machines: what is told without asking, what is asked, and what still costs."""

import threading

import pytest

from fakes.machines import GPU_BOX, ScriptedMachines, add_remote_run, name_machines
from stillroom.errors import ConfigError
from stillroom.lineage import now
from stillroom.remote.host import UnreachableError
from stillroom.remote.machine_list import ListMachines, ask_all, list_machines
from stillroom.remote.machines import find_machine
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.records import MachineFacts, RemoteView
from stillroom.settings import Workspace

TWO = """
gpu-box: {ssh: me@host, price_per_hour: 2.40}
sky: {skypilot: {accelerators: "A100-80GB:2", use_spot: true}}
"""
NOBODY = ScriptedMachines({})


@pytest.fixture
def provision_log(tmp_path):
    return ProvisionLog(tmp_path / "provision_log")


def listed(workspace, provision_log, *, check=False, opened=NOBODY, release=None):
    return list_machines(
        workspace,
        ListMachines(check=check),
        opened=opened,
        provision_log=provision_log,
        release=release or (lambda _log: pytest.fail("a run needs it")),
    )


def test_without_a_check_nobody_is_asked(tmp_path, provision_log):
    found = listed(name_machines(tmp_path, TWO), provision_log)

    box, sky = found.machines
    assert (box.kind, box.address, box.state) == ("ssh", "me@host", "not_asked")
    assert (box.price_per_hour, box.usd_per_hour_now, box.runs) == (2.4, 0.0, [])
    assert box.computes == "hardware not known yet"
    assert (sky.kind, sky.state, sky.computes) == ("skypilot", "down", "2 x A100-80GB")
    assert "use_spot: True" in sky.address
    assert found.usd_per_hour_now == 0.0


def test_without_machines_the_list_is_empty(tmp_path, provision_log):
    assert listed(name_machines(tmp_path, ""), provision_log).machines == []


def test_a_faulty_machines_yml_is_an_error_with_its_line(tmp_path, provision_log):
    with pytest.raises(ConfigError, match=r"machines.yml:1"):
        listed(name_machines(tmp_path, "gpu-box: {shh: me@host}\n"), provision_log)


def test_a_run_shows_where_it_stands_and_what_its_machine_costs(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    view = RemoteView(where="gpu-box", phase="running", last_contact=now(), machine_usd=0.75)
    run = add_remote_run(workspace, view)
    add_remote_run(workspace, RemoteView(where="gpu-box", phase="over", machine_usd=1.25))

    box = listed(workspace, provision_log).machines[0]

    assert box.state == "in_use"
    assert [(one.run_id, one.phase) for one in box.runs] == [(run.run_id, "running")]
    assert box.spent_usd == pytest.approx(2.0)
    assert box.usd_per_hour_now == 2.4


def test_a_run_that_waits_costs_nothing_yet(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    add_remote_run(workspace, None)

    box = listed(workspace, provision_log).machines[0]

    assert (box.state, box.usd_per_hour_now) == ("not_asked", 0.0)
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
    opened = ScriptedMachines({"gpu-box": GPU_BOX, "far": silent, "sky": planned})

    box, sky, far = listed(workspace, provision_log, check=True, opened=opened).machines

    assert sorted(opened.asked) == ["far", "gpu-box", "sky"]
    assert opened.num_open == 0
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
    opened = ScriptedMachines({"gpu-box": GPU_BOX, "sky": away})
    assert listed(workspace, provision_log, check=True, opened=opened).machines[1].state == "down"

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
    answer = ask_all(workspace, [machine], Hanging({"gpu-box": GPU_BOX}), most_s=0.05)["gpu-box"]
    free.set()

    assert "did not answer within 0.05 s" in str(answer)


def test_what_is_up_without_a_run_costs_and_says_how_to_put_it_down(tmp_path, provision_log):
    workspace = name_machines(tmp_path, TWO)
    sky = find_machine(workspace, "sky")
    run = add_remote_run(workspace, RemoteView(where="sky", phase="running"), machine=sky)
    with provision_log.holding("stillroom-sky") as held:
        held.add(sky, "stillroom-sky", run.path)
        held.update(request_id=None, price_per_hour=3.2)

    busy = listed(workspace, provision_log)
    assert (busy.machines[1].state, busy.usd_per_hour_now) == ("in_use", 3.2)
    assert busy.machines[1].problem is None

    with provision_log.holding("stillroom-sky") as held:
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
        gpus=["4 x Nvidia A10G, 96 GB in all"],
        gpu_memory_gb=[24.0] * 4,
    )
    opened = ScriptedMachines({"hub": listing}, price_per_hour=5.0)

    hub = listed(workspace, provision_log, check=True, opened=opened).machines[0]

    assert (hub.state, hub.computes, hub.usd_per_hour_now) == ("down", "4 x Nvidia A10G", 0.0)
    assert (hub.price_per_hour, hub.gpu_memory_gb) == (5.0, [24.0] * 4)
    assert listed(workspace, provision_log).machines[0].price_per_hour == 5.0

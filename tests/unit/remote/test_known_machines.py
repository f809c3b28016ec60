"""What is known of a machine without probing it, and the plans that follow from it."""

import msgspec
import pytest
import yaml

from fakes.conversations import answer, user
from fakes.gguf_files import write_gguf
from fakes.machines import GPU_BOX, ScriptedMachines, add_remote_run, name_machines
from fakes.training import make_project
from stillroom.errors import InputError
from stillroom.files import write_json
from stillroom.lineage import now
from stillroom.remote.host import UnreachableError
from stillroom.remote.known_machines import hardware_of, load_probe, save_probe
from stillroom.remote.machines import find_machine
from stillroom.remote.planning import plan_training
from stillroom.remote.records import JobSpec
from stillroom.run_folder import REMOTE_FILE, VIEW_FILE, RemoteView
from stillroom.train.config.file import load_config
from stillroom.train.config.request import PlanTraining, requests_per_model
from stillroom.train.planning.forecast import combined_forecast
from stillroom.types import RunStatus

BOX = "gpu-box: {ssh: me@host, price_per_hour: 2.40}\n"
CONFIG = {
    "dataset_type": "sft",
    "data": {"train_file": "rows.jsonl", "batch_size": 8},
    "model": {"path": "Qwen/Qwen3-0.6B"},
}


def config_of(root, *, teacher=None, **model):
    path = root / "config.yml"
    sections = {"model": {**CONFIG["model"], **model}, **({"teacher": teacher} if teacher else {})}
    path.write_text(yaml.safe_dump({**CONFIG, **sections}))
    return load_config(path)


@pytest.mark.parametrize(
    ("entry", "gpus"),
    [
        ("{skypilot: {accelerators: 'H100:4'}}", ["H100"] * 4),
        ("{skypilot: {accelerators: L4}}", ["L4"]),
        ("{skypilot: {accelerators: {A100-80GB: 8}}}", ["A100-80GB"] * 8),
        ("{skypilot: {accelerators: [L4, A10G]}}", []),
        ("{skypilot: {cpus: 4}}", []),
        ("{hf_jobs: a10g-large}", ["A10G"]),
        ("{hf_jobs: a10g-largex4}", ["A10G"] * 4),
        ("{hf_jobs: l40sx8}", ["L40S"] * 8),
        ("{hf_jobs: a100-large}", ["A100 80GB"]),
        ("{hf_jobs: cpu-basic}", []),
        ("{ssh: me@host}", []),
    ],
)
def test_what_a_provider_is_asked_for_is_known_before_it_is_up(tmp_path, entry, gpus):
    workspace = name_machines(tmp_path, f"m: {entry}\n")
    hardware = hardware_of(workspace, find_machine(workspace, "m"))

    assert (list(hardware.gpus), hardware.is_known) == (gpus, bool(gpus))


def test_what_a_machine_answered_wins(tmp_path):
    workspace = name_machines(tmp_path, BOX)
    machine = find_machine(workspace, "gpu-box")
    assert load_probe(workspace, machine) is None

    save_probe(workspace, machine, GPU_BOX)
    hardware = hardware_of(workspace, machine)

    assert list(hardware.gpus) == ["NVIDIA H100 80GB HBM3"]
    assert hardware.price_per_hour == 2.4
    assert hardware.free_disk_gb == 500.0

    # A price that changed does not make it another machine.
    dearer = name_machines(tmp_path, BOX.replace("2.40", "3.40"))

    assert hardware_of(dearer, find_machine(dearer, "gpu-box")).price_per_hour == 3.4
    assert load_probe(dearer, find_machine(dearer, "gpu-box")) is not None


def test_the_rate_is_that_of_the_last_run_of_the_same_training_there(tmp_path):
    workspace = name_machines(tmp_path, BOX + "other: {ssh: me@other}\n")
    box, config = find_machine(workspace, "gpu-box"), config_of(tmp_path)

    def ran(machine, rate, status=RunStatus.SUCCEEDED, **model):
        run = add_remote_run(
            workspace,
            RemoteView(where=machine.name, phase="over", last_contact=now()),
            machine=machine,
            status=status,
            metrics={"tokens_per_s": rate},
        )
        write_json(run.path / "config.json", config_of(tmp_path, **model).model_dump(mode="json"))
        return run.run_id

    ran(find_machine(workspace, "other"), 1.0)
    ran(box, 2.0, qlora_rank=0)
    ran(box, None)
    assert hardware_of(workspace, box, config).measured is None

    ran(box, 30.0, RunStatus.CANCELLED)
    measured = hardware_of(workspace, box, config).measured
    assert measured is not None
    assert measured.tokens_per_s == 30.0

    run_id = ran(box, 1500.0)
    ran(box, 30.0, RunStatus.CANCELLED)
    measured = hardware_of(workspace, box, config).measured

    assert measured is not None
    assert (measured.run_id, measured.tokens_per_s, measured.other_s) == (run_id, 1500.0, None)


@pytest.mark.parametrize(
    ("status", "resume", "other_s"),
    [
        (RunStatus.SUCCEEDED, None, 30.0),
        (RunStatus.SUCCEEDED, "sft-1", None),
        (RunStatus.CANCELLED, None, None),
    ],
)
def test_what_a_whole_run_took_beside_its_steps_is_known(tmp_path, status, resume, other_s):
    workspace = name_machines(tmp_path, BOX)
    box, config = find_machine(workspace, "gpu-box"), config_of(tmp_path)
    run = add_remote_run(
        workspace,
        RemoteView(where=box.name, phase="over", last_contact=now()),
        machine=box,
        status=status,
        metrics={"tokens_per_s": 100.0},
        started_at="2026-11-24T10:00:00Z",
        ended_at="2026-11-24T10:01:30Z",
        result={"trained_tokens": 6000},
    )
    write_json(run.path / "config.json", config.model_dump(mode="json"))
    request = msgspec.structs.replace(run.read_request(), request={"resume": resume})
    write_json(run.request_file, request)

    assert hardware_of(workspace, box, config).measured.other_s == other_s


def test_the_price_of_a_rented_machine_is_what_its_last_run_there_paid(tmp_path):
    workspace = name_machines(tmp_path, "sky: {skypilot: {accelerators: 'H100:1'}}\n" + BOX)
    sky = find_machine(workspace, "sky")
    assert hardware_of(workspace, sky).price_per_hour is None

    for hour, usd in ((1, 9.0), (2, 1.5)):
        view = RemoteView(
            where="sky",
            phase="over",
            last_contact=f"2026-11-23T0{hour}:00:00Z",
            machine_usd=usd,
            seconds_used=1800.0,
        )
        add_remote_run(workspace, view, machine=sky, status=RunStatus.SUCCEEDED)

    assert hardware_of(workspace, sky).price_per_hour == pytest.approx(3.0)


def test_packages_that_no_earlier_run_on_the_machine_had_count_as_not_installed(
    tmp_path, tiny_models
):
    workspace = name_machines(tmp_path, BOX)
    box = find_machine(workspace, "gpu-box")
    save_probe(workspace, box, msgspec.structs.replace(GPU_BOX, stillroom_version="0.1.0"))
    plain, nf4 = config_of(tmp_path), config_of(tmp_path, quantization="nf4")

    def is_installed(config):
        return hardware_of(workspace, box, config).is_installed

    # Another workspace may have installed them.
    assert is_installed(nf4)
    for extras, has_started in ((["train"], True), (["train", "qlora"], False)):
        view = RemoteView(where="gpu-box", has_started=has_started)
        run = add_remote_run(workspace, view, machine=box)
        spec = JobSpec(machine=box, files=[], home_paths=[], extras=extras)
        write_json(run.path / REMOTE_FILE, spec)
        assert (is_installed(plain), is_installed(nf4)) == (True, False)
    write_json(run.path / VIEW_FILE, msgspec.structs.replace(view, has_started=True))
    assert is_installed(nf4)
    # A GGUF file may also be a teacher, or have the template.
    write_gguf(tmp_path / "m.gguf", tiny_models.load("llama"))
    assert not is_installed(config_of(tmp_path, chat_template="m.gguf"))
    for teacher in ({"path": "m.gguf"}, {"path": "m", "provider": "vllm", "tokenizer": "m.gguf"}):
        assert not is_installed(config_of(tmp_path, teacher=teacher))


MACHINES = """
gpu-box: {ssh: me@host, price_per_hour: 2.40}
far: {ssh: me@far}
sky: {skypilot: {accelerators: "L4:1"}, price_per_hour: 0.8}
cluster: {ray: "ray://head:10001"}
"""
ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(6)]


@pytest.fixture
def project(tmp_path, tiny_models):
    project = make_project(tmp_path, "sft", tiny_models.folder("llama", "chatml"))
    project.write(ROWS)
    project.write_config()
    name_machines(tmp_path, MACHINES)
    return project


def test_a_machine_is_asked_once_and_the_known_ones_are_weighed_beside_it(project):
    open_machine = ScriptedMachines({"gpu-box": GPU_BOX})
    request = PlanTraining(where="gpu-box")

    plan_training(project.workspace, request, open_machine=open_machine)
    result = plan_training(project.workspace, request, open_machine=open_machine)

    assert open_machine.asked == ["gpu-box"]
    assert open_machine.num_open == 0
    assert [one.machine for one in result.machines] == ["gpu-box", "sky"]
    assert (result.device, result.memory_free_gb) == ("cuda", pytest.approx(78.9))
    assert result.disk_free_gb == 500.0


def test_a_machine_that_does_not_answer_is_an_error_and_no_guess(project):
    open_machine = ScriptedMachines({"far": UnreachableError("no route to far", "is it on?")})

    with pytest.raises(UnreachableError, match="no route"):
        plan_training(project.workspace, PlanTraining(where="far"), open_machine=open_machine)


@pytest.mark.parametrize(
    ("where", "overrides", "problem"),
    [
        ("cluster", (), "a Ray cluster, whose GPUs stillroom cannot query"),
        ("gpubox", (), "there is no machine"),
        ("gpu-box", ("trainer.trackio_project=p",), "trackio_project"),
    ],
)
def test_what_start_training_would_refuse_is_refused(project, where, overrides, problem):
    open_machine = ScriptedMachines({"gpu-box": GPU_BOX})

    with pytest.raises(InputError, match=problem):
        plan_training(
            project.workspace,
            PlanTraining(where=where, overrides=overrides),
            open_machine=open_machine,
        )


def test_several_models_are_planned_one_after_another_on_each_machine(project, tiny_models):
    open_machine = ScriptedMachines({"gpu-box": GPU_BOX})
    path = str(tiny_models.folder("llama", "chatml"))
    other = str(tiny_models.folder("qwen3", "chatml"))
    request = PlanTraining(where="gpu-box", overrides=(f"model.path=[{path}, {other}]",))
    requests = requests_per_model(project.workspace, request)

    forecasts = [
        plan_training(project.workspace, one, open_machine=open_machine) for one in requests
    ]
    both = combined_forecast(requests, forecasts)

    assert [one.machine for one in both.machines] == ["gpu-box", "sky"]
    alone = forecasts[0].machines[0].usd_most
    assert alone is not None
    # The first installation, ten minutes at most, is paid once.
    assert both.machines[0].usd_most == pytest.approx(2 * alone - 2.4 / 6, rel=0.2)

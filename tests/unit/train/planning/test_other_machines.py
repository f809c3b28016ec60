"""A training's plan for a machine that this one is not."""

from dataclasses import replace

import pytest

from fakes.conversations import answer, user
from fakes.training import make_project
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.hardware import EarlierRate, Hardware
from stillroom.train.planning.other_machines import plan_on_machines
from stillroom.train.planning.plan import plan_training

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}. " * 8)]} for i in range(12)]
PAIRS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}.")],
        "rejected": [answer("No.")],
    }
    for i in range(6)
]
H100 = Hardware("box", gpus=["NVIDIA H100 80GB HBM3"], gpu_memory_gb=[79.6], price_per_hour=3.0)
LAPTOP = Hardware("old", num_processors=4, memory_gb=16.0, free_disk_gb=0.001)


@pytest.fixture
def project(tmp_path, tiny_models):
    project = make_project(tmp_path, "sft", tiny_models.folder("llama", "chatml"))
    project.write(ROWS)
    project.write_config()
    return project


def planned(project, *machines, overrides=()):
    return plan_on_machines(project.workspace, PlanTraining(overrides=overrides), machines)


def test_the_plan_is_that_of_the_machine_and_counts_as_the_plan_here_does(project):
    here = plan_training(project.workspace, PlanTraining())
    there = planned(project, H100)

    assert (there.device, there.fits, there.memory_free_gb) == ("cuda", True, pytest.approx(78.9))
    for same in ("rows", "steps", "epoch_tokens", "parameters", "trained_parameters", "method"):
        assert getattr(there, same) == getattr(here, same)
    # The GPU holds no libraries, and weights of two bytes.
    assert there.memory_gb < here.memory_gb
    [box] = there.machines
    assert there.seconds == box.seconds_most
    assert box.usd_most == pytest.approx(there.seconds * 3.0 / 3600)
    assert any("the time is a range" in note for note in there.notes)


def test_the_other_machines_are_weighed_too_each_with_its_own_device(project):
    box, laptop, unknown = planned(project, H100, LAPTOP, Hardware("far", is_known=False)).machines

    assert box.fits
    assert laptop.fits
    assert laptop.memory_gb > 1.0 > box.memory_gb
    assert laptop.computes == "no GPU, 4 processors"
    assert (unknown.seconds_most, unknown.memory_free_gb) == (None, None)


def test_a_machine_that_is_too_small_is_said_to_be_with_what_to_change(project):
    tiny = Hardware("toy", gpus=["T4"], gpu_memory_gb=[0.702])
    result = planned(project, tiny, H100)

    assert not result.fits
    assert result.changes
    assert [machine.fits for machine in result.machines] == [False, True]
    assert any("no fast bf16" in note for note in result.notes)


def test_a_full_disk_there_is_seen(project):
    result = planned(project, Hardware("full", gpus=["H100"], free_disk_gb=1e-6))

    assert not result.fits
    assert "keep_checkpoints" in result.changes[0]


def test_a_measured_rate_gives_the_time(project):
    slow = Hardware("box", gpus=["H100"], measured=EarlierRate("sft-abc", 0.5))
    result = planned(project, slow)

    assert result.tokens_per_s == 0.5
    assert result.seconds is not None
    trained = 3 * sum(len(row["messages"][1]["content"]) for row in ROWS)
    assert result.seconds > 0.1 * trained
    whole = Hardware("box", gpus=["H100"], measured=EarlierRate("sft-abc", 0.5, other_s=20.0))
    [box] = planned(project, whole).machines
    assert box.based_on == "sft-abc, the same training on box: 0 tokens per second"
    steps_s = result.epoch_trained_tokens / 0.5
    assert box.seconds_least == pytest.approx(0.9 * (20.0 + steps_s))
    assert box.seconds_most == pytest.approx(1.15 * (20.0 + steps_s))


def test_one_gpu_of_several_is_used_unless_the_config_says_otherwise(project):
    many = Hardware("box", gpus=["H100"] * 4, gpu_memory_gb=[79.6] * 4)

    alone, shared = (
        planned(project, many),
        planned(project, many, overrides=["launcher=accelerate"]),
    )

    assert any("launcher.kind=accelerate uses all of them" in note for note in alone.notes)
    assert any("4 processes" in note for note in shared.notes)


@pytest.mark.parametrize("method", ["dpo", "distill"])
def test_pairs_and_on_policy_distillation_are_planned(tmp_path, tiny_models, method):
    start = tiny_models.folder("llama", "chatml")
    sections = {"teacher": {"path": str(start)}} if method == "distill" else {}
    project = make_project(tmp_path, method, start, **sections)
    project.write(PAIRS if method == "dpo" else [{"prompt": f"Item {i}?"} for i in range(6)])
    project.write_config()

    result = planned(project, H100)

    assert result.seconds is not None
    assert result.machines[0].seconds_least is not None
    assert (method == "distill") == any(
        "per rollout (rollout.max_turns)" in note for note in result.notes
    )


@pytest.mark.parametrize("measured", [None, EarlierRate("run", tokens_per_s=10.0)])
def test_the_most_time_of_rollouts_counts_all_of_their_turns(tmp_path, tiny_models, measured):
    start = tiny_models.folder("llama", "chatml")
    project = make_project(tmp_path, "distill", start, teacher={"path": str(start)})
    project.write([{"prompt": f"Item {i}?"} for i in range(6)])
    project.write_config()
    box = replace(H100, measured=measured)

    (one,), (many,), (bounded,) = (
        planned(project, box, overrides=[f"rollout.max_turns={turns}", *others]).machines
        for turns, others in ((1, ()), (8, ()), (8, ["rollout.max_context_window=4096"]))
    )

    assert many.seconds_least == one.seconds_least
    assert many.seconds_most > bounded.seconds_most > one.seconds_most
    assert many.usd_most == pytest.approx(many.seconds_most * 3.0 / 3600)


def test_a_cluster_that_only_the_machine_reaches_is_not_looked_for_here(project):
    launcher = ("launcher.kind=ray", "launcher.address=127.0.0.1:1", "launcher.num_processes=2")
    request = PlanTraining(where="box", overrides=launcher)

    assert plan_on_machines(project.workspace, request, [H100]).fits

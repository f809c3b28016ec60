"""Two processes that train together do what one does: losses, weights, checkpoints, resumption."""

import pytest
import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.model_server import FakeModelServer
from fakes.ranks import in_processes
from fakes.reporters import KeptReporter
from fakes.training import make_project, write_run_files
from stillroom.errors import DivergedError, RunCancelledError
from stillroom.train.config.request import StartTraining, plan_request
from stillroom.train.run import train_in_process
from stillroom.train.student.collective import ALONE, Collective
from stillroom.types import RunStatus

# Sums over two processes are formed in another order, and Adam divides by small gradients' size.
LOSS_GAP, WEIGHT_GAP = 2e-6, 5e-5
SFT_ROWS = [
    {"messages": [user(f"Item {i}?"), answer("It costs " + "so " * (i % 4) + f"{i}.")]}
    for i in range(11)
]
DPO_ROWS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}.")],
        "rejected": [answer("No." * (1 + i % 3))],
    }
    for i in range(9)
]
UNLIKE = {"tokens_per_s", "memory_gb"}
OWN_PROMPT = {"system": "You sell lamps. Name the price at once."}
"""What the teacher reads and the student does not."""
WAYS = [
    ("sft", 0, False),
    ("sft", 0, True),
    ("sft", 2, True),
    ("dpo", 2, False),
    ("dpo", 2, True),
]


def project_of(method, root, tiny_models, rank, *, dropout=0.0, **trainer):
    start = tiny_models.folder("qwen3", "chatml", attention_dropout=dropout)
    given = {"num_epochs": 2, "learning_rate": 3e-3, "save_step": 4, **trainer}
    project = make_project(
        root,
        method,
        start,
        # The last batch of an epoch has one row, so a process has none.
        data={"batch_size": 4, "val_split": 0.2},
        model={"qlora_rank": rank},
        trainer=given,
    )
    project.write(SFT_ROWS if method == "sft" else DPO_ROWS)
    project.write_config()
    return project


def train_part(project, run, peers, *, reporter=None, resume=None):
    """Trains in one of the processes; returns its result and what it told."""
    folder = project.root / "runs" / run
    folder.mkdir(parents=True, exist_ok=True)
    reported = reporter or KeptReporter()
    request = StartTraining(resume=resume)
    plan = plan_request(project.workspace, request)
    result = train_in_process(
        project.workspace, request, plan, folder=folder, reporter=reported, peers=peers
    )
    return result, reported.measured


def stop_early(project, folder, *, is_sharded):
    """Two processes train until the first is asked to stop after two steps."""

    def work(peers):
        reporter = KeptReporter(lambda: peers.is_first and len(reporter.measured) >= 2)
        with pytest.raises(RunCancelledError):
            train_part(project, "stopped", peers, reporter=reporter)

    in_processes(work, folder, is_sharded=is_sharded)
    request = StartTraining(config="config.yml")
    write_run_files(project.root / "runs" / "stopped", request, RunStatus.CANCELLED)


def weights_of(project, run, name="final"):
    files = sorted(project.checkpoint(name, run).glob("*model.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


@pytest.mark.parametrize(("method", "rank", "is_sharded"), WAYS)
def test_two_processes_train_as_one_does(tmp_path, tiny_models, method, rank, is_sharded):
    project = project_of(method, tmp_path, tiny_models, rank)
    whole, reported = train_part(project, "one", ALONE)

    parts = in_processes(
        lambda peers: train_part(project, "two", peers), tmp_path / "ranks", is_sharded=is_sharded
    )

    (first, told_first), (second, told_second) = parts
    assert first.checkpoint == second.checkpoint
    assert first.trained_tokens == whole.trained_tokens
    assert [m.keys() for m in told_first] == [m.keys() for m in reported]
    # Before the first step all margins are rounding errors.
    for steps in (reported, told_first, told_second):
        steps[0].pop("pair_accuracy", None)
    for ours, others, reference in zip(told_first, told_second, reported, strict=True):
        for name in ours.keys() - UNLIKE:
            assert ours[name] == pytest.approx(reference[name], abs=LOSS_GAP, rel=1e-5), name
            assert ours[name] == others[name]
    assert project.checkpoints("two") == project.checkpoints("one")
    ours, reference = weights_of(project, "two"), weights_of(project, "one")
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        assert tensor.dtype == ours[name].dtype
        torch.testing.assert_close(ours[name], tensor, atol=WEIGHT_GAP, rtol=0)


def distill_project(root, tiny_models, *, rank=0, substeps=1, prompts=5, teacher=(), trainer=()):
    start = tiny_models.folder("llama", "clerk")
    project = make_project(
        root,
        "distill",
        start,
        teacher={"path": str(tiny_models.folder("llama", "clerk", seed=1)), **dict(teacher)},
        data={"batch_size": 2, "group_size": 2},
        model={"qlora_rank": rank},
        algorithm={"substeps": substeps},
        rollout={"max_tokens": 12},
        trainer=dict(trainer),
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(prompts)])
    project.write_config()
    return project


@pytest.mark.parametrize(("rank", "substeps", "teacher"), [(0, 2, {}), (2, 1, OWN_PROMPT)])
def test_two_processes_distil_as_one_does(tmp_path, tiny_models, rank, substeps, teacher):
    # The last iteration has one prompt, so a process samples nothing.
    project = distill_project(tmp_path, tiny_models, rank=rank, substeps=substeps, teacher=teacher)
    whole, reported = train_part(project, "one", ALONE)

    parts = in_processes(lambda peers: train_part(project, "two", peers), tmp_path / "ranks")

    assert_like_one(project, whole, reported, parts)


def test_two_processes_with_a_served_teacher_distil_as_one_does(tmp_path, tiny_models):
    with FakeModelServer(tiny_models.load("llama", "clerk", seed=1)) as server:
        teacher = {"path": "served", "provider": "vllm", "base_url": server.base_url}
        project = distill_project(tmp_path, tiny_models, rank=2, teacher=teacher)
        whole, reported = train_part(project, "one", ALONE)

        parts = in_processes(lambda peers: train_part(project, "two", peers), tmp_path / "ranks")

    assert_like_one(project, whole, reported, parts)


def assert_like_one(project, whole, reported, parts):
    """Fails unless the run `two` of two processes has the metrics and weights of the run `one`."""
    (first, told_first), (_, told_second) = parts
    assert first.trained_tokens == whole.trained_tokens
    assert len(reported) == 3
    for ours, others, reference in zip(told_first, told_second, reported, strict=True):
        assert ours.keys() == reference.keys()
        for name in ours.keys() - UNLIKE - {"sample_s", "update_s"}:
            assert ours[name] == pytest.approx(reference[name], abs=LOSS_GAP, rel=1e-4), name
            assert ours[name] == others[name]
    ours, reference = weights_of(project, "two"), weights_of(project, "one")
    for name, tensor in reference.items():
        torch.testing.assert_close(ours[name], tensor, atol=WEIGHT_GAP, rtol=0)


@pytest.mark.parametrize(
    ("method", "rank", "is_sharded"),
    [("sft", 0, False), ("dpo", 2, True), ("distill", 0, False)],
)
def test_processes_stop_together_and_go_on_as_if_they_had_not(
    tmp_path, tiny_models, method, rank, is_sharded
):
    if method == "distill":
        project = distill_project(tmp_path, tiny_models, teacher=OWN_PROMPT)
    else:
        # With dropout each process's random numbers must go on as they were.
        project = project_of(method, tmp_path, tiny_models, rank, dropout=0.3)

    stop_early(project, tmp_path / "a", is_sharded=is_sharded)
    assert project.checkpoints("stopped") == ["step_000002"]
    (_, went_on), _ = in_processes(
        lambda peers: train_part(project, "resumed", peers, resume="stopped"),
        tmp_path / "b",
        is_sharded=is_sharded,
    )
    (_, unbroken), _ = in_processes(
        lambda peers: train_part(project, "whole", peers), tmp_path / "c", is_sharded=is_sharded
    )

    losses = [metrics["loss"] for metrics in unbroken]
    assert [metrics["loss"] for metrics in went_on] == losses[2:]
    ours, reference = weights_of(project, "resumed"), weights_of(project, "whole")
    assert all(torch.equal(ours[name], tensor) for name, tensor in reference.items())


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models, 0)

    stop_early(project, tmp_path / "ranks", is_sharded=True)
    alone, _ = train_part(project, "alone", ALONE, resume="stopped")
    in_processes(
        lambda peers: train_part(project, "three", peers, resume="stopped"),
        tmp_path / "three",
        size=3,
    )
    train_part(project, "whole", ALONE)

    assert alone.steps == 6
    reference = weights_of(project, "whole")
    for run in ("alone", "three"):
        ours = weights_of(project, run)
        for name, tensor in reference.items():
            torch.testing.assert_close(ours[name], tensor, atol=WEIGHT_GAP, rtol=0)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_diverges_ends_in_every_process_alike(tmp_path, tiny_models, is_sharded):
    project = project_of(
        "sft", tmp_path, tiny_models, 0, learning_rate=1e4, max_grad_norm=1e9, save_step=1
    )

    def diverge(peers):
        with pytest.raises(DivergedError) as caught:
            train_part(project, "run", peers)
        return caught.value.problem

    first, second = in_processes(diverge, tmp_path / "ranks", is_sharded=is_sharded)

    assert first == second
    for name in project.checkpoints("run"):
        assert all(t.isfinite().all() for t in weights_of(project, "run", name).values())


def test_shares_hold_every_row_once_and_about_as_many_tokens():
    lengths = [5, 90, 3, 40, 41, 7, 8, 60]

    shares = [Collective(rank, 3).share(lengths) for rank in range(3)]

    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) <= 90
    assert Collective().share(lengths) == list(range(len(lengths)))


def test_gradients_are_summed_whoever_has_them(tmp_path):
    def work(peers):
        grown = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 1 << 22, 2)]
        for number, parameter in enumerate(grown[:3]):
            if number != peers.rank:
                parameter.grad = torch.full_like(parameter, float(peers.rank + 1))
        peers.sum_gradients(grown)
        return [None if p.grad is None else p.grad.unique().tolist() for p in grown]

    first, second = in_processes(work, tmp_path / "ranks")

    assert first == second == [[2.0], [1.0], [3.0], None]

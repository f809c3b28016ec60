"""Evaluations while a run trains."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.ranks import in_processes
from fakes.reporters import KeptReporter
from fakes.training import PRICE_TOOL, Project, make_project
from stillroom.errors import ConfigError, InputError, RunCancelledError
from stillroom.train.config.request import StartTraining, plan_request
from stillroom.train.run import train_in_process
from stillroom.train.student.collective import ALONE

SAID = "The answer is 12."
SFT_ROWS = [{"messages": [user(f"Item {i}?"), answer(SAID)]} for i in range(8)]
DPO_ROWS = [
    {"prompt": [user(f"Item {i}?")], "chosen": [answer(SAID)], "rejected": [answer("No.")]}
    for i in range(8)
]
PROMPTS = [{"prompt": f"Item {i}?"} for i in range(8)]
ROWS = {"sft": SFT_ROWS, "dpo": DPO_ROWS, "distill": PROMPTS}
HELD_OUT = [{"prompt": f"Thing {i}?", "metadata": {"expected_answer": "12"}} for i in range(6)]
EVAL = {"name": "heldout", "step": 2}


@pytest.fixture
def make(tmp_path, tiny_models):
    def make(method="sft", *evals, **sections) -> Project:
        clerk = tiny_models.folder("llama", "clerk")
        folder = tmp_path / f"project-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if method == "distill":
            sections["teacher"] = {"path": str(tiny_models.folder("llama", "clerk", seed=1))}
        project = make_project(
            folder, method, clerk, rollout={"max_tokens": 8, "max_turns": 2}, **sections
        )
        project.write(ROWS[method])
        project.write(HELD_OUT, name="heldout.jsonl")
        project.config["evals"] = list(evals)
        return project

    return make


def measured(project, name):
    return {
        step: metrics[name]
        for step, metrics in enumerate(project.reporter.measured, start=1)
        if name in metrics
    }


def test_the_student_is_evaluated_every_so_many_steps_and_at_the_end(make):
    requested = {**EVAL, "pass4": True, "pass4_temperature": 0.5}
    trainer = {"num_epochs": 5, "learning_rate": 3e-2, "schedule": "constant"}
    project = make("sft", requested, data={"batch_size": 8}, trainer=trainer)

    project.train()

    greedy, sampled = (measured(project, f"eval/heldout/pass{k}") for k in (1, 4))
    assert greedy.keys() == sampled.keys() == {2, 4, 5}
    assert greedy[5] == sampled[5] == 1.0
    assert "eval_s" in project.reporter.measured[4]
    assert "heldout at step 5: pass@1 1.000 [0.610, 1.000] on 6 prompts" in project.reporter.notes


def test_one_set_of_samples_serves_all_counts_at_the_same_temperature(make):
    requested = {**EVAL, "step": 1, "pass1_temperature": 1.0, "pass4": True, "pass8": True}
    project = make("sft", requested, data={"batch_size": 8}, trainer={"learning_rate": 1e-9})

    project.train()

    [one], [four], [eight] = (
        measured(project, f"eval/heldout/pass{k}").values() for k in (1, 4, 8)
    )
    # A clerk answers or calls the tool, one as likely as the other.
    assert 0.2 < one < 0.8
    assert one < four <= eight
    assert len(project.reporter.notes) == 3


@pytest.mark.parametrize("method", ["sft", "distill"])
def test_training_is_the_same_with_and_without_evaluations(make, method):
    requested = {**EVAL, "step": 1, "pass1_temperature": 1.0}
    weights, losses = [], []
    for evals in ([], [requested]):
        project = make(method, *evals)
        (project.root / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
        project.train()
        weights.append(load_file(project.checkpoint() / "model.safetensors"))
        losses.append([metrics["loss"] for metrics in project.reporter.measured])

    assert "eval/heldout/pass1" in project.reporter.measured[0]
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("num_prompts", [6, 1])
def test_processes_that_train_together_share_the_prompts_and_say_the_same(
    make, tmp_path, num_prompts
):
    requested = {**EVAL, "step": 1, "pass1_temperature": 1.0, "n": num_prompts}
    project = make("sft", requested, data={"batch_size": 8})
    project.write_config()

    def trained(peers):
        request, folder = StartTraining(), tmp_path / f"run-of-{peers.size}"
        plan, reporter = plan_request(project.workspace, request), KeptReporter()
        train_in_process(
            project.workspace, request, plan, folder=folder, reporter=reporter, peers=peers
        )
        return [metrics["eval/heldout/pass1"] for metrics in reporter.measured]

    first, second = in_processes(trained, tmp_path / "ranks")

    assert first == second == trained(ALONE)


def test_a_run_that_is_stopped_while_it_evaluates_keeps_its_step(make):
    project = make("sft", {**EVAL, "step": 1})
    project.reporter = KeptReporter(stop_when=lambda: project.root.joinpath("stop").exists())
    (project.root / "rewards.py").write_text(
        "from pathlib import Path\n"
        "from stillroom.tools import reward\n\n"
        "@reward\n"
        "def right(args, messages) -> float:\n"
        f"    Path({str(project.root / 'stop')!r}).touch()\n"
        "    return 1.0\n",
        encoding="utf-8",
    )

    with pytest.raises(RunCancelledError):
        project.train()

    assert project.checkpoints() == ["step_000001"]
    assert not any("pass@" in note for note in project.reporter.notes)


def test_an_evaluation_whose_rollouts_fail_does_not_end_the_training(make):
    project = make("sft", {**EVAL, "step": 1})
    (project.root / "rewards.py").write_text(
        "from stillroom.tools import reward\n\n"
        "@reward\n"
        "def right(args, messages) -> float:\n"
        "    raise OSError('no scale')\n",
        encoding="utf-8",
    )

    project.train()

    assert project.checkpoints() == ["final"]
    assert measured(project, "eval/heldout/pass1") == {}
    assert measured(project, "eval/heldout/failed") == {1: 1.0, 2: 1.0}
    assert any("not measured" in note and "no scale" in note for note in project.reporter.notes)


def test_prompts_that_nothing_judges_are_refused_before_training(make):
    project = make("sft", EVAL)
    project.write(PROMPTS, name="heldout.jsonl")

    with pytest.raises(InputError, match="for any of the 8 prompts") as caught:
        project.train()

    assert "rewards.py" in caught.value.fix
    assert project.reporter.measured == []


def test_prompts_without_an_answer_are_left_out_of_an_evaluation_with_a_note(make):
    project = make("sft", EVAL)
    lines = (project.root / "heldout.jsonl").read_text("utf-8").splitlines()
    answerless = {"prompt": "Say hello."}
    text = "\n".join([*lines, json.dumps(answerless)]) + "\n"
    (project.root / "heldout.jsonl").write_text(text, "utf-8")

    project.train()

    assert any(f"skips 1 of {len(lines) + 1} prompts" in n for n in project.reporter.notes)


def test_evaluations_may_change_when_a_run_goes_on(make):
    project = make("sft", EVAL, trainer={"save_step": 1})
    project.train("run-1")
    project.reporter = KeptReporter()

    project.train("run-2", "evals=[]", resume="run-1")

    # The events of the first run are not there: a fake reporter wrote none.
    assert measured(project, "eval/heldout/pass1") == {}


@pytest.mark.parametrize(
    ("evals", "reported"),
    [
        ([{**EVAL, "name": "elsewhere"}], "'elsewhere.jsonl' of the evaluation 'elsewhere'"),
        ([EVAL, EVAL], "the names of evals must differ"),
        ([{**EVAL, "pass1": False}], "needs pass1, pass4 or pass8"),
        ([{**EVAL, "pass_4": True}], "evals.0.pass_4 is not known (did you mean 'pass4'?)"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(make, evals, reported):
    with pytest.raises(ConfigError) as caught:
        make("sft", *evals).train()

    assert reported in caught.value.problem

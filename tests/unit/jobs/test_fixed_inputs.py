"""What a run reads is what was there when it was started, or the run says what has changed."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pydantic import BaseModel

from fakes.conversations import answer, user
from fakes.rollout_lines import encoded
from fakes.rollout_rows import rollout_row, write_lines
from fakes.training import PRICE_TOOL, make_project
from stillroom import api
from stillroom.api.curation import LARGE_BYTES, carry_out
from stillroom.api.operations import operation_named, operation_of_run
from stillroom.jobs import detached, worker
from stillroom.run_folder import RunFolder, RunState, find_run, given_config
from stillroom.settings import Workspace

NO_PROCESS = 2**22 + 1
REWARDS = """
import right as answers
from stillroom.tools import reward

@reward
def right(args, messages):
    return answers.RIGHT
"""


class NeverStarted:
    """Stands for a process that the test runs itself, once it has edited a file."""

    pid = NO_PROCESS

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self) -> int:
        return 0


def run_after(
    workspace: Workspace, name: str, request: BaseModel, edit: Callable[[], None]
) -> tuple[RunFolder, RunState]:
    """Starts a run, calls `edit` before its process would have begun, then does its work here."""
    with mock.patch.object(detached.subprocess, "Popen", NeverStarted):
        report = carry_out(workspace, operation_named(name), request)
    assert isinstance(report, api.RunReport)
    edit()
    folder = find_run(workspace, report.run_id)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(sys, "argv", ["worker", str(folder.path)]):
            worker.main(operation_of_run)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return folder, folder.read()


def assert_refused(state: RunState, path: Path) -> None:
    assert state.status == "failed"
    assert state.error is not None
    assert state.error.problem == f"{path} has changed since this run was started"
    assert "start it again" in state.error.fix


def append_to(path: Path) -> Callable[[], None]:
    def edit() -> None:
        with path.open("ab") as stream:
            stream.write(b"\n")

    return edit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    row = {"prompt": "What is 6 times 7?", "metadata": {"expected_answer": "42"}}
    write_lines(tmp_path / "prompts.jsonl", [encoded(row)])
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    (tmp_path / "right.py").write_text("RIGHT = 1.0\n", encoding="utf-8")
    (tmp_path / "rubric.md").write_text("Is it right?", encoding="utf-8")
    (tmp_path / "judge.yml").write_text(
        "model: judge\nrubric: rubric.md\nbase_url: http://127.0.0.1:9/v1\n", encoding="utf-8"
    )
    return tmp_path


ANSWERING = {"model": "x", "provider": "openai", "base_url": "http://127.0.0.1:9/v1"}
JUDGING = {"rewards": "rewards.py", "judge": "judge.yml"}
REQUESTS = {
    "generate_rollouts": {"input": "prompts.jsonl", "tools": "tools.py", **ANSWERING, **JUDGING},
    "evaluate_model": {"data": "prompts.jsonl", "tools": "tools.py", **ANSWERING, **JUDGING},
    "score_rollouts": {"input": "rollouts.jsonl", "output": "scored.jsonl", **JUDGING},
}
JUDGING_FILES = ("rewards.py", "right.py", "judge.yml", "rubric.md")


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        *(("generate_rollouts", n) for n in ("prompts.jsonl", "tools.py", *JUDGING_FILES)),
        *(("evaluate_model", n) for n in ("prompts.jsonl", "tools.py", *JUDGING_FILES)),
        *(("score_rollouts", n) for n in ("rollouts.jsonl", *JUDGING_FILES)),
    ],
)
def test_no_file_that_was_edited_since_the_call_is_used(folder: Path, name: str, edited: str):
    request = operation_named(name).request(**REQUESTS[name])

    _, state = run_after(Workspace(folder), name, request, append_to(folder / edited))

    assert_refused(state, folder / edited)
    assert not (folder / "rollouts" / "rollouts.jsonl").exists()
    assert not (folder / "scored.jsonl").exists()


@pytest.mark.parametrize("edited", ["rollouts.jsonl", "held_out.jsonl"])
def test_no_large_file_that_was_edited_since_the_call_is_filtered(folder: Path, edited: str):
    row = rollout_row(metadata={"text": "x" * LARGE_BYTES})
    write_lines(folder / "rollouts.jsonl", [encoded(row)])
    write_lines(folder / "held_out.jsonl", [encoded({"prompt": "Item 9?"})])
    request = operation_named("filter_dataset").request(
        input="rollouts.jsonl", output="kept.jsonl", decontaminate=["held_out.jsonl"]
    )

    _, state = run_after(Workspace(folder), "filter_dataset", request, append_to(folder / edited))

    assert_refused(state, folder / edited)
    assert not (folder / "kept.jsonl").exists()


@pytest.mark.parametrize("name", ["generate_rollouts", "evaluate_model", "export_model"])
def test_no_model_that_was_changed_since_the_call_is_used(folder: Path, tiny_models, name: str):
    model = folder / "model"
    model.mkdir()
    for file in tiny_models.folder("llama", "chatml").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    own = {"provider": "hf", "model": "model"}
    requests = {
        "generate_rollouts": {"input": "prompts.jsonl", **own},
        "evaluate_model": {"data": "prompts.jsonl", **own},
        "export_model": {"model": "model", "output": "export"},
    }
    request = operation_named(name).request(**requests[name])

    _, state = run_after(Workspace(folder), name, request, append_to(model / "config.json"))

    assert_refused(state, model)


@pytest.fixture
def training(tmp_path: Path, tiny_models):
    project = make_project(tmp_path, "sft", tiny_models.folder("llama", "chatml"))
    project.write([{"messages": [user(f"Item {i}?"), answer(f"{i}.")]} for i in range(8)])
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    (tmp_path / "right.py").write_text("RIGHT = 1.0\n", encoding="utf-8")
    write_lines(
        tmp_path / "held_out.jsonl",
        [encoded({"prompt": "Item 9?", "metadata": {"expected_answer": "9"}})],
    )
    project.config["evals"] = [{"name": "held", "step": 50, "file": "held_out.jsonl"}]
    project.write_config()
    return project


@pytest.mark.parametrize("edited", ["train.jsonl", "held_out.jsonl", "tools.py", "right.py"])
def test_no_training_file_that_was_edited_since_the_call_is_used(training, edited: str):
    path = training.root / edited

    _, state = run_after(training.workspace, "start_training", api.StartTraining(), append_to(path))

    assert_refused(state, path)


def test_a_training_has_the_config_that_was_there_when_it_was_started(training):
    rate = training.config["trainer"]["learning_rate"]
    before = (training.root / "config.yml").read_bytes()

    def edit() -> None:
        training.config["trainer"]["learning_rate"] = 123.0
        training.write_config()

    run, state = run_after(training.workspace, "start_training", api.StartTraining(), edit)

    assert state.status == "succeeded", state.error
    trained = json.loads((run.path / "config.json").read_bytes())
    assert trained["trainer"]["learning_rate"] == rate
    assert (run.path / given_config(training.root / "config.yml")).read_bytes() == before
    manifest = json.loads((run.path / "checkpoints/final/stillroom.manifest.json").read_bytes())
    assert manifest["inputs"][0]["path"] == str(training.root / "config.yml")
    assert manifest["inputs"][0]["num_bytes"] == len(before)

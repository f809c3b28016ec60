"""What a run on another machine writes is, but for times, what it would have written at home."""

import shutil
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from pydantic import BaseModel

from fakes.conversations import answer, user
from fakes.elsewhere import (
    away,
    changed,
    do_run,
    lay_out,
    naming,
    own_machine,
    packed_run,
    without_times,
)
from fakes.training import make_project
from stillroom.evaluate.files import Evaluation
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.evaluate.unfinished import answers_folder
from stillroom.export.request import ExportModel, plan_export
from stillroom.files import read_json, write_json
from stillroom.lineage import read_manifest
from stillroom.projects.create import CreateProject, create_project
from stillroom.remote.bundle.layout import read_contents
from stillroom.remote.bundle.needs import (
    Needs,
    needs_of_evaluation,
    needs_of_export,
    needs_of_generation,
    needs_of_scoring,
    needs_of_training,
)
from stillroom.rollout.plan import plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts, plan_scoring
from stillroom.rollout.results import origin_of
from stillroom.run_folder import REMOTE_FILE, RunFolder, given_config
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining, plan_request
from stillroom.types import RunKind, RunStatus

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(10)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_CONFIG", str(tmp_path / "own"))
    own_machine()


def elsewhere(
    workspace: Workspace,
    base: Path,
    kind: RunKind,
    request: BaseModel,
    needs: Needs,
    **new: Any,
) -> Workspace:
    """Does a run with the files that its spec sends, and returns the workspace there."""
    packed, run = packed_run(workspace, needs, kind=kind, **new)
    variable = lay_out(run, packed.spec, base)
    shutil.rmtree(run.path)
    with away(variable):
        there = Workspace(base / "workspace")
        do_run(there, kind, request, f"{kind}-1")
    return there


def test_a_training_elsewhere_writes_what_one_at_home_writes(tmp_path, tiny_models):
    # The model lies outside of the workspace, reached through a link.
    model = tmp_path / "models" / "base"
    model.parent.mkdir()
    model.symlink_to(tiny_models.folder("llama", "chatml"))
    home = tmp_path / "home"
    home.mkdir()
    sections = {"model": {"qlora_rank": 4}, "trainer": {"save_step": 2}}
    project = make_project(home, "sft", model, **sections)
    project.config["data"]["train_file"] = str(tmp_path / "rows" / "train.jsonl")
    (tmp_path / "rows").mkdir()
    project.write(ROWS, name="../rows/train.jsonl")
    project.write_config()

    request = StartTraining(config="config.yml")
    plan = plan_request(project.workspace, request)
    run_files = {given_config(plan.config_file): plan.config_file.read_bytes()}
    needs = needs_of_training(request, plan)
    there = elsewhere(
        project.workspace, tmp_path / "there", RunKind.SFT, request, needs, run_files=run_files
    )
    folder = do_run(project.workspace, RunKind.SFT, request, "sft-1").path

    written = there.runs / "sft-1"
    # The state of a checkpoint to resume from says how many seconds it took.
    assert changed(folder, written, is_timed=True) == []
    assert changed(folder / "checkpoints" / "final", written / "checkpoints" / "final") == []
    assert naming(there.runs / "sft-1", str(tmp_path / "there")) == ["request.json"]
    manifest = read_manifest(there.runs / "sft-1" / "checkpoints" / "final")
    assert manifest is not None
    assert [record.path for record in manifest.inputs] == [
        str(home / "config.yml"),
        str(tmp_path / "rows" / "train.jsonl"),
    ]
    assert manifest.models[0].location == str(model.resolve())


@pytest.fixture
def demo(tmp_path: Path) -> Workspace:
    (tmp_path / "home").mkdir()
    workspace = Workspace(tmp_path / "home")
    create_project(workspace, CreateProject(path="demo", template="demo"))
    return workspace


ASKED = {"model": "teacher", "provider": "demo", "n": 3, "concurrency": 3, "seed": 1}
CODE = {"tools": "demo/tools.py", "rewards": "demo/rewards.py"}


def test_rollouts_rewards_and_evaluations_elsewhere_are_those_of_a_run_at_home(tmp_path, demo):
    generate = GenerateRollouts(
        input="demo/prompts.jsonl", output="demo/out.jsonl", **ASKED, **CODE
    )
    needs = needs_of_generation(plan_generation(demo, generate))
    there = elsewhere(demo, tmp_path / "there", RunKind.ROLLOUTS, generate, needs)
    do_run(demo, RunKind.ROLLOUTS, generate, "rollouts-1")
    assert changed(demo.runs, there.runs, is_timed=True) == []
    assert same_output(demo, there, "demo/out.jsonl")
    assert naming(there.root, str(tmp_path / "there")) == ["runs/rollouts-1/request.json"]

    score = ScoreRollouts(
        input="demo/out.jsonl", output="demo/scored.jsonl", rewards="demo/rewards.py"
    )
    needs = needs_of_scoring(score, plan_scoring(demo, score))
    there = elsewhere(demo, tmp_path / "scored", RunKind.SCORE, score, needs)
    do_run(demo, RunKind.SCORE, score, "score-1")
    assert changed(demo.runs / "score-1", there.runs / "score-1", is_timed=True) == []
    assert same_output(demo, there, "demo/scored.jsonl")
    assert naming(there.root, str(tmp_path / "scored")) == ["runs/score-1/request.json"]

    evaluate = EvaluateModel(data="demo/heldout.jsonl", **ASKED, **CODE)
    needs = needs_of_evaluation(plan_evaluation(demo, evaluate))
    there = elsewhere(demo, tmp_path / "evaluated", RunKind.EVALUATE, evaluate, needs)
    do_run(demo, RunKind.EVALUATE, evaluate, "evaluate-1")
    assert changed(demo.runs / "evaluate-1", there.runs / "evaluate-1", is_timed=True) == []
    assert naming(there.root, str(tmp_path / "evaluated")) == ["runs/evaluate-1/request.json"]


def test_an_evaluation_elsewhere_reuses_the_answers_of_one_that_did_not_finish(tmp_path, demo):
    # Only answers that are sold identify the model that gave them.
    (demo.root / "prices.yml").write_text("teacher: {input: 1, output: 1}\n", encoding="utf-8")
    evaluate = EvaluateModel(data="demo/heldout.jsonl", **ASKED, **CODE)
    plan = plan_evaluation(demo, evaluate)
    first = do_run(demo, RunKind.EVALUATE, evaluate, "evaluate-0")
    answers = first.path / answers_folder(plan, anyio.run(origin_of, plan.rollouts))
    (answers / ".main.jsonl").mkdir(parents=True)
    (answers / ".main.jsonl" / "settings.json").write_text("{}", encoding="utf-8")
    row, *_ = (first.path / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (answers / "main.jsonl").write_bytes(row)
    (first.path / REMOTE_FILE).write_text("{}", encoding="utf-8")
    ended = {"status": RunStatus.CANCELLED, "result": None, "created_at": "2026-11-01T10:00:00Z"}
    first.write(msgspec.structs.replace(first.read(), **ended))

    needs = needs_of_evaluation(plan)
    there = elsewhere(demo, tmp_path / "there", RunKind.EVALUATE, evaluate, needs)

    [evaluation] = there.runs.glob("*/evaluation.json")
    result = read_json(evaluation, Evaluation).result
    assert (result.reused, result.accuracy.n) == (1, 3)
    # One that asked for other answers has not made these superfluous, whatever its name and budget.
    other = evaluate.model_copy(update={"system": "Be brief."})
    second = do_run(demo, RunKind.EVALUATE, other, "evaluate-2")
    (second.path / REMOTE_FILE).write_text("{}", encoding="utf-8")
    assert answers / "main.jsonl" in needs.reusable
    assert needs_of_evaluation(plan).reusable == needs.reusable
    # Repeating a finished one asks for all answers.
    same = evaluate.model_copy(update={"name": "again", "budget_usd": 1.0})
    write_json(
        second.request_file,
        msgspec.structs.replace(second.read_request(), request=same.model_dump(mode="json")),
    )
    assert not needs_of_evaluation(plan).reusable
    # Answers that were deleted before they were sent are asked for again.
    packed, run = packed_run(demo, needs, kind=RunKind.EVALUATE)
    shutil.rmtree(first.path)
    sent = {file.remote_path for file in read_contents(run, packed.spec).files}
    assert "workspace/demo/heldout.jsonl" in sent
    assert not [path for path in sent if "evaluate-0" in path]


def test_an_export_elsewhere_is_that_of_one_at_home(tmp_path, tiny_models):
    home = tmp_path / "home"
    home.mkdir()
    start = tiny_models.folder("llama", "chatml")
    project = make_project(home, "sft", start, model={"qlora_rank": 4})
    project.write(ROWS)
    heldout = [{"prompt": f"Item {i}?", "metadata": {"expected_answer": f"{i}"}} for i in range(2)]
    project.write(heldout, name="heldout.jsonl")
    project.train()
    workspace = project.workspace
    evaluate = EvaluateModel(data="heldout.jsonl", model="run-1", max_tokens=4)
    evaluated = do_run(workspace, RunKind.EVALUATE, evaluate, "evaluate-1")
    # A verification asks for its answers, so those of an unfinished evaluation are not sent.
    unfinished = RunFolder(shutil.copytree(evaluated.path, workspace.runs / "evaluate-0"))
    (unfinished.path / "evaluation.json").unlink()
    (unfinished.path / "answers-1").mkdir()
    for name in (REMOTE_FILE, "answers-1/main.jsonl"):
        (unfinished.path / name).write_text("{}", encoding="utf-8")
    unfinished.write(msgspec.structs.replace(evaluated.read(), status=RunStatus.CANCELLED))
    earlier = ExportModel(model="run-1", output="earlier", format="merged")
    do_run(workspace, RunKind.EXPORT, earlier, "export-0")
    evaluate = EvaluateModel(data="heldout.jsonl", model="earlier", max_tokens=4)
    do_run(workspace, RunKind.EVALUATE, evaluate, "evaluate-2")

    request = ExportModel(model="run-1", output="out", format="merged", verify=2)
    needs = needs_of_export(request, plan_export(workspace, request))
    assert not [path for path in (*needs.files, *needs.reusable) if "answers-1" in path.parts]
    there = elsewhere(workspace, tmp_path / "there", RunKind.EXPORT, request, needs)
    do_run(workspace, RunKind.EXPORT, request, "export-1")
    assert changed(home / "out", there.root / "out", is_timed=True) == []
    own = {"runs/export-1/request.json", "runs/export-1/run.json"}
    assert set(naming(there.root, str(tmp_path / "there"))) <= own
    card = (there.root / "out" / "README.md").read_text(encoding="utf-8")
    assert "evaluate-1" in card
    assert "evaluate-2" in card
    assert "train.jsonl" in card


def same_output(home: Workspace, there: Workspace, name: str) -> bool:
    """Whether an output and its manifest are the same in both workspaces, but for times."""
    return all(
        without_times(home.root / one, is_timed=True)
        == without_times(there.root / one, is_timed=True)
        for one in (name, f"{name}.manifest.json")
    )

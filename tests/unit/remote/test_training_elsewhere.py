"""A training that moves from machine to machine is the unbroken one, and what follows is local."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from fakes.elsewhere import do_run, naming, own_machine
from fakes.runs_elsewhere import Elsewhere
from fakes.tiny_models import TinyModels
from fakes.training import Project, make_project
from fakes.user_files import write_tools
from fakes.waiting import wait_until
from stillroom import api
from stillroom.api import EvaluateModel, ExportModel
from stillroom.files import read_json
from stillroom.jobs import remote_runs
from stillroom.outputs import OutputHeldError
from stillroom.remote.records import JobSpec
from stillroom.run_folder import REMOTE_FILE, RunFolder
from stillroom.types import RunKind

TESTS = Path(__file__).parents[2]
# The second iteration waits at its first reward for as long as the gate is closed.
REWARDS = """
    import time
    import uuid
    from pathlib import Path

    GATE = Path({gate!r})

    @reward
    def gated(args, messages):
        if (GATE / "closed").exists():
            num_calls = len(list(GATE.glob("call-*")))
            (GATE / f"call-{{uuid.uuid4().hex}}").touch()
            while num_calls >= 4 and (GATE / "closed").exists():
                time.sleep(0.02)
        return float(len(get_response(messages)) % 2)
    """


@pytest.fixture
def elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_program: Path
) -> Iterator[Elsewhere]:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("STILLROOM_PYTHON_THERE", str(warm_program))
    monkeypatch.setenv("STILLROOM_CONFIG", str(tmp_path / "own"))
    monkeypatch.setattr(remote_runs, "_FOLLOWER", "fakes.local_follower")
    rig = Elsewhere(tmp_path)
    (tmp_path / "there2").mkdir()
    own_machine(
        f"box: {{ssh: gpu.test, folder: {tmp_path}/there, keep_remote: true}}\n"
        f"other: {{ssh: gpu2.test, folder: {tmp_path}/there2}}"
    )
    yield rig
    rig.close()


def distillation(root: Path, models: TinyModels, gate: Path) -> Project:
    start, teacher = models.folder("llama", "chatml"), models.folder("llama", "chatml", seed=1)
    project = make_project(
        root,
        "distill",
        start,
        teacher={"path": str(teacher)},
        data={"batch_size": 2, "group_size": 2},
        rollout={"max_tokens": 8},
        trainer={"save_step": 1},
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(6)])
    project.write_config()
    write_tools(root, REWARDS.format(gate=str(gate)), name="rewards.py")
    return project


def worker_of(machine: Path, run: str) -> psutil.Process:
    folder = RunFolder(machine / "runs" / run / "workspace" / "runs" / run)
    pid = folder.read().pid
    assert pid is not None
    return psutil.Process(pid)


def test_a_run_whose_machine_died_goes_on_elsewhere_bit_for_bit(
    elsewhere: Elsewhere, tiny_models: TinyModels, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    distillation(whole, tiny_models, elsewhere.gate).train("whole")

    workspace = elsewhere.workspace
    project = distillation(elsewhere.home, tiny_models, elsewhere.gate)
    (elsewhere.gate / "closed").touch()
    first = api.start_training(workspace, api.StartTraining(where="box"))
    run = RunFolder(workspace.runs / first.run_id)
    brought = run.path / "checkpoints" / "step_000001" / "training_state.json"
    wait_until(lambda: brought.exists() or elsewhere.report(run).status == "failed", timeout_s=90)
    assert elsewhere.report(run).error is None
    worker_of(elsewhere.there, first.run_id).send_signal(signal.SIGKILL)
    ended = elsewhere.wait_for(run, "interrupted", "failed")
    assert "killed by SIGKILL" in ended.error.problem
    assert "resume" in ended.error.fix

    (elsewhere.gate / "closed").unlink()
    second = api.start_training(workspace, api.StartTraining(where="other", resume=first.run_id))
    ended = elsewhere.wait_for(RunFolder(workspace.runs / second.run_id), "succeeded", "failed")
    assert ended.error is None
    project.train("here", resume=first.run_id)
    unbroken = load_file(whole / "runs/whole/checkpoints/final/model.safetensors")
    for name in (second.run_id, "here"):
        ours = load_file(workspace.runs / name / "checkpoints/final/model.safetensors")
        assert all(ours[weight].equal(unbroken[weight]) for weight in unbroken)
    start = load_file(tiny_models.folder("llama", "chatml") / "model.safetensors")
    assert any(not unbroken[weight].equal(start[weight]) for weight in start)
    assert naming(workspace.runs / second.run_id / "checkpoints", str(tmp_path / "there")) == []
    # What it names is here, and all that follows is done here as ever.
    lineage = api.show_lineage(workspace, api.ShowLineage(path=second.run_id))
    assert lineage.problems == []
    evaluate = EvaluateModel(
        model=second.run_id, data="train.jsonl", rewards="rewards.py", max_tokens=4
    )
    evaluated = do_run(workspace, RunKind.EVALUATE, evaluate, "evaluate-1").read()
    assert evaluated.result is not None
    export = ExportModel(model=second.run_id, output="models/out", where="box", verify=2)
    exported = api.export_model(workspace, export)
    ended = elsewhere.ended(RunFolder(workspace.runs / exported.run_id))
    assert ended.error is None
    lineage = api.show_lineage(workspace, api.ShowLineage(path="models/out"))
    assert lineage.problems == []
    assert naming(elsewhere.home / "models", str(tmp_path / "there")) == []


def test_rollouts_go_on_elsewhere_where_another_machine_left_them(elsewhere: Elsewhere) -> None:
    workspace = elsewhere.workspace
    rows = "".join(f'{{"prompt": "What does item {i} cost?"}}\n' for i in range(6))
    (elsewhere.home / "prompts.jsonl").write_text(rows, encoding="utf-8")
    write_tools(elsewhere.home, REWARDS.format(gate=str(elsewhere.gate)), name="gated.py")
    (elsewhere.gate / "closed").touch()
    request = api.GenerateRollouts(
        input="prompts.jsonl",
        output="out.jsonl",
        rewards="gated.py",
        model="teacher",
        provider="demo",
        n=6,
        concurrency=2,
        where="box",
    )
    first = api.generate_rollouts(workspace, request)
    run = RunFolder(workspace.runs / first.run_id)
    output = elsewhere.home / "out.jsonl"
    wait_until(lambda: num_rows(output) == 4 or elsewhere.report(run).status == "failed")
    assert elsewhere.report(run).error is None
    with pytest.raises(OutputHeldError, match=first.run_id):
        api.generate_rollouts(workspace, request)
    worker_of(elsewhere.there, first.run_id).send_signal(signal.SIGKILL)
    elsewhere.wait_for(run, "interrupted", "failed")

    (elsewhere.gate / "closed").unlink()
    second = api.generate_rollouts(workspace, request.model_copy(update={"where": "other"}))
    ended = elsewhere.ended(RunFolder(workspace.runs / second.run_id))
    assert ended.status == "succeeded", ended.error
    assert (ended.result["succeeded"], ended.result["already_done"]) == (6, 4)
    assert num_rows(output) == 6


def num_rows(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_several_models_are_trained_elsewhere_one_after_another(
    elsewhere: Elsewhere, tiny_models: TinyModels
) -> None:
    elsewhere.cut()
    workspace = elsewhere.workspace
    distillation(elsewhere.home, tiny_models, elsewhere.gate)
    paths = [tiny_models.folder("llama", "chatml", seed=seed) for seed in range(3)]
    override = f"model.path=[{', '.join(map(str, paths))}]"
    report = api.start_training(workspace, api.StartTraining(where="box", overrides=(override,)))
    assert len(report.then) == 2
    runs = [RunFolder(workspace.runs / run_id) for run_id in (report.run_id, *report.then)]
    specs = [read_json(run.path / REMOTE_FILE, JobSpec) for run in runs]
    assert [spec.start_after for spec in specs] == [
        [],
        [report.run_id],
        [report.run_id, report.then[0]],
    ]
    assert {spec.machine.name for spec in specs} == {"box"}
    for run in runs:
        api.cancel_run(workspace, api.CancelRun(run_id=run.run_id))
    for run in runs:
        elsewhere.wait_for(run, "cancelled")

"""An export that verifies its files succeeds only if they answer as the checkpoint did."""

import json
import shutil
from pathlib import Path

import anyio
import pytest

from fakes.exports import trained
from fakes.llama_cpp import write_checkout, write_server
from fakes.reporters import KeptReporter
from stillroom.errors import EngineError
from stillroom.evaluate.request import EvaluateModel
from stillroom.evaluate.run import evaluate_model
from stillroom.export.request import ExportModel
from stillroom.export.run import ExportResult, export_model
from stillroom.files import write_json
from stillroom.settings import Workspace

REWARDS = """
from stillroom.tools import RewardArgs, reward

@reward()
def right(args: RewardArgs, messages: list) -> float:
    return float({right})
"""
EVALUATE = {
    "model": "run-1", "data": "heldout.jsonl", "rewards": "rewards.py", "max_tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_models) -> Path:
    """A project whose run-1 is an adapter that evaluate-1 has evaluated: 6 of 6 tasks."""
    workspace = trained(
        tmp_path_factory.mktemp("made"), tiny_models.folder("qwen3"), rank=4
    ).workspace
    rows = [{"prompt": f"What does lamp {i} cost?"} for i in range(6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (workspace.root / "heldout.jsonl").write_text(text, encoding="utf-8")
    (workspace.root / "rewards.py").write_text(REWARDS.format(right=True), encoding="utf-8")
    folder = workspace.runs / "evaluate-1"
    folder.mkdir()
    document = {"kind": "evaluate", "workspace": str(workspace.root), "request": EVALUATE}
    write_json(folder / "request.json", document)

    async def evaluate() -> None:
        request = EvaluateModel(**EVALUATE)
        await evaluate_model(workspace, request, folder=folder, reporter=KeptReporter())

    anyio.run(evaluate)
    return workspace.root


@pytest.fixture
def project(made, tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    shutil.copytree(made, tmp_path / "project")
    return Workspace(tmp_path / "project")


def export(workspace: Workspace, **fields) -> ExportResult:
    folder = workspace.runs / "export-1"
    folder.mkdir(exist_ok=True)
    request = ExportModel(**{"model": "run-1", "output": "out", "verify": 4, **fields})
    return export_model(workspace, request, folder=folder, reporter=KeptReporter())


def refused(workspace: Workspace, **fields) -> EngineError:
    with pytest.raises(EngineError) as caught:
        export(workspace, **fields)
    assert not (workspace.root / "out").exists()
    return caught.value


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_the_written_files_answer_before_the_export_is_done(project, kind) -> None:
    result = export(project, format=kind)
    (verified,) = result.verified
    assert (verified.served_by, verified.tasks, verified.accuracy) == ("transformers", 4, 1.0)
    assert (verified.checkpoint_accuracy, verified.evaluation) == (1.0, "evaluate-1")
    card = (project.root / "out" / "README.md").read_text("utf-8")
    assert (
        "transformers loaded the written files to verify this export: they solved 100.0% of 4 tasks"
        in card
    )


def test_files_that_answer_worse_are_not_kept(project) -> None:
    (project.root / "rewards.py").write_text(REWARDS.format(right=False), encoding="utf-8")
    error = refused(project)
    assert "the written files solve 0% of 4 tasks and the checkpoint 100%" in error.problem
    assert "precision fp32" in error.fix


def test_without_an_evaluation_there_is_nothing_to_compare_with(project) -> None:
    shutil.rmtree(project.runs / "evaluate-1")
    error = refused(project)
    assert "but there is none" in error.problem
    assert "evaluate_model(model=run-1" in error.fix


def test_a_gguf_file_is_loaded_by_llama_cpp(project, tmp_path) -> None:
    checkout = write_checkout(tmp_path / "llama.cpp")
    fields = {"format": "gguf", "llama_cpp": str(checkout)}
    write_server(checkout, "It costs 12.", start="sys.exit('unknown architecture')")
    broken = refused(project, **fields)
    expected = "the server of the written files ended with code 1: unknown architecture"
    assert expected in broken.problem
    assert "verify_server.txt" in broken.fix
    assert "build/bin/llama-server -m" in broken.fix

    write_server(checkout, "It costs 12.")
    result = export(project, **fields)
    assert [one.served_by for one in result.verified] == ["llama.cpp"]
    assert not any("was not loaded" in warning for warning in result.warnings)
    card = (project.root / "out" / "README.md").read_text("utf-8")
    assert "llama.cpp loaded the written files" in card
    assert "was not loaded" not in card


def test_without_llama_server_a_package_loads_it_and_it_answers_as_the_checkpoint(project) -> None:
    pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")
    result = export(project, format="gguf", precision="fp32")
    (verified,) = result.verified
    assert (verified.served_by, verified.tasks, verified.accuracy) == ("llama.cpp", 4, 1.0)
    assert verified.same_answers == 1.0
    card = (project.root / "out" / "README.md").read_text("utf-8")
    assert "100% of the answers are the same word for word." in card


def test_a_gguf_file_that_no_program_can_load_is_not_verified(project, tmp_path) -> None:
    pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")
    checkout = write_checkout(tmp_path / "llama.cpp")
    error = refused(project, format="gguf", llama_cpp=str(checkout))
    assert "the server of the written files ended with code" in error.problem
    assert "stillroom.export.gguf.server" in error.fix


def test_files_that_solve_nothing_and_answer_nothing_alike_are_not_kept(project, tmp_path) -> None:
    (project.root / "rewards.py").write_text(REWARDS.format(right=False), encoding="utf-8")
    evaluated = project.runs / "evaluate-1" / "evaluation.json"
    text = evaluated.read_text("utf-8").replace('"success":1.0', '"success":0.0')
    evaluated.write_text(text.replace('"success": 1.0', '"success": 0.0'), encoding="utf-8")
    assert export(project).verified[0].same_answers == 1.0

    checkout = write_checkout(tmp_path / "llama.cpp")
    write_server(checkout, "Something else.")
    fields = {"format": "gguf", "llama_cpp": str(checkout), "output": "out-2"}
    with pytest.raises(EngineError, match="solve 0% of 4 tasks and the checkpoint 0%"):
        export(project, **fields)

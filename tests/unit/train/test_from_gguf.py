"""A student that comes as a GGUF file is trained, loaded again, traced and exported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fakes.exports import ROWS
from fakes.gguf_files import write_gguf
from fakes.reporters import KeptReporter
from fakes.tiny_models import TinyModels
from fakes.training import Project, make_project
from stillroom.export.request import ExportModel
from stillroom.export.run import ExportResult, export_model
from stillroom.files import file_sha256
from stillroom.lineage import read_manifest
from stillroom.models.gguf.folder import convert_gguf
from stillroom.models.load import load_model
from stillroom.models.resolve import adapter_base, locate_model
from stillroom.trace.request import ShowLineage, State
from stillroom.trace.show import show_lineage
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.plan import plan_training


@pytest.fixture
def project(
    tmp_path: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> Project:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "project"
    root.mkdir()
    write_gguf(root / "tiny.gguf", tiny_models.load("llama", tie_word_embeddings=True))
    made = make_project(root, "sft", Path("tiny.gguf"), model={"qlora_rank": 4})
    made.write(ROWS[:8])
    return made


def export(project: Project, kind: str, **options: str) -> ExportResult:
    folder = project.root / "runs" / f"export-{kind}"
    folder.mkdir()
    request = ExportModel(model="run-1", output=kind, format=kind, **options)
    return export_model(project.workspace, request, folder=folder, reporter=KeptReporter())


def test_a_trained_adapter_names_the_file_that_it_belongs_to(project):
    project.train()
    path = project.root / "tiny.gguf"
    checkpoint = locate_model(project.workspace, "run-1")

    settings = json.loads((checkpoint.path / "adapter_config.json").read_bytes())
    [student] = read_manifest(checkpoint.path).models

    assert settings["base_model_name_or_path"] == str(path)
    assert checkpoint.record.base_model == str(path)
    assert adapter_base(project.workspace, checkpoint).path == path
    assert (student.location, student.sha256) == (str(path), file_sha256(path))


def test_lineage_names_the_file_and_whether_it_is_still_the_same(project):
    project.train()

    before = show_lineage(project.workspace, ShowLineage(path="run-1"))
    path = project.root / "tiny.gguf"
    path.write_bytes(path.read_bytes() + bytes(32))
    after = show_lineage(project.workspace, ShowLineage(path="run-1"))

    [was, now] = [
        next(node for node in shown.root.inputs if node.role == "student")
        for shown in (before, after)
    ]
    assert (was.state, now.state) == (State.SAME, State.CHANGED)
    assert was.path == "tiny.gguf"


def test_merged_weights_and_an_adapter_answer_as_the_checkpoint_does(project):
    project.train()
    workspace = project.workspace
    merged, adapter = (
        project.root / export(project, kind).output for kind in ("merged", "adapter")
    )

    models = [load_model(workspace, locate_model(workspace, name)).model
              for name in ("run-1", "merged", "adapter", "tiny.gguf")]  # fmt: skip
    with torch.no_grad():
        trained, again, same, base = (m(torch.tensor([range(7, 47)])).logits for m in models)

    assert torch.allclose(again, trained, atol=1e-4)
    assert torch.allclose(same, trained, atol=1e-4)
    assert not torch.allclose(base, trained, atol=1e-2)
    card = (merged / "README.md").read_text("utf-8")
    assert f"tiny.gguf (sha256 {file_sha256(project.root / 'tiny.gguf')[:12]})" in card
    assert "Base model: mit, according to the metadata of tiny.gguf." in card
    # Other programs find the base in the folder that was made of the file.
    named = json.loads((adapter / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    assert named == str(convert_gguf(project.root / "tiny.gguf"))


def test_an_exported_gguf_file_answers_as_the_checkpoint_does(project):
    project.train()
    exported = export(project, "gguf", precision="fp32")
    [path] = (project.root / exported.output).glob("*.gguf")

    models = [load_model(project.workspace, locate_model(project.workspace, name)).model
              for name in ("run-1", str(path), "tiny.gguf")]  # fmt: skip
    with torch.no_grad():
        trained, again, base = (m(torch.tensor([range(7, 47)])).logits for m in models)

    assert torch.allclose(again, trained, atol=1e-4)
    assert not torch.allclose(base, trained, atol=1e-2)


def test_a_stated_licence_gives_way_to_that_of_the_file(project):
    project.config["model"]["license"] = "apache-2.0"
    project.train()

    result = export(project, "merged")

    assert result.licence == "mit"
    [said] = [line for line in result.warnings if "model.license" in line]
    assert said == (
        "model.license in config.yml says apache-2.0, but the metadata of tiny.gguf says mit, "
        "which the card shows"
    )


def test_the_first_run_and_the_next_train_the_same_weights(project):
    weights = []
    for run in ("run-1", "run-2"):
        project.train(run)
        weights.append((project.checkpoint(run=run) / "adapter_model.safetensors").read_bytes())

    assert weights[0] == weights[1]


def test_a_plan_takes_the_file_too(project):
    project.write_config()
    result = plan_training(project.workspace, PlanTraining())

    assert result.parameters > 0
    assert result.fits


def test_finding_the_file_loads_no_heavy_library(project):
    script = (
        "import sys\n"
        "from stillroom.models.resolve import locate_model\n"
        "from stillroom.settings import open_workspace\n"
        "print(locate_model(open_workspace(), 'tiny.gguf').is_gguf,\n"
        "  sorted({'torch', 'transformers', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
        cwd=project.root,
    )  # fmt: skip
    assert finished.stdout.strip() == "True []"

import hashlib
import json
import resource
import shutil
from dataclasses import replace

import pytest
import yaml
from transformers import AutoModelForCausalLM

from fakes.exports import trained
from fakes.folders import names_in
from fakes.reporters import KeptReporter
from fakes.run_folders import answer, write_evaluation
from stillroom.errors import EngineError, InputError, RunCancelledError, RunError
from stillroom.evaluate.files import GuardResult, TaskCost
from stillroom.evaluate.intervals import share_estimate
from stillroom.export.history import cost_comparison, read_history
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.lineage import read_manifest, record_folder
from stillroom.models.resolve import adapter_base, locate_model
from stillroom.settings import Workspace
from stillroom.trace.request import ShowLineage
from stillroom.trace.show import show_lineage

NO_EVALUATION = "this checkpoint was not evaluated, so the model card has no evaluation"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_models):
    """A project whose run-1 is an adapter."""
    return trained(tmp_path_factory.mktemp("made"), tiny_models.folder("qwen3"), rank=4)


@pytest.fixture
def project(made, tmp_path):
    """A copy that a test may change; its base stays where it was."""
    shutil.copytree(made.root, tmp_path / "project")
    return Workspace(tmp_path / "project")


def export(workspace, run="export-1", reporter=None, **fields):
    folder = workspace.runs / run
    folder.mkdir(exist_ok=True)
    request = ExportModel(**{"model": "run-1", "output": "out", **fields})
    return export_model(workspace, request, folder=folder, reporter=reporter or KeptReporter())


def header_of(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_an_export_has_a_card_and_the_hash_of_every_file(project):
    result = export(project)

    out = project.root / "out"
    manifest = json.loads((out / "export.json").read_text("utf-8"))
    listed = {record["path"]: record["sha256"] for record in manifest["files"]}
    assert sorted([*listed, "export.json", "stillroom.manifest.json"]) == names_in(out)
    for name, sha256 in listed.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == sha256
        assert (out / name).stat().st_mode & 0o777 == 0o644
    assert (manifest["run_id"], manifest["method"], manifest["step"]) == ("run-1", "sft", 10)
    assert (result.output, result.format, result.precision) == ("out", "merged", "fp32")
    assert result.files == len(listed)
    assert result.card == "out/README.md"
    assert result.serve == (
        "vllm serve out --served-model-name out --dtype float32 --max-model-len 512 "
        "--enable-auto-tool-choice --tool-call-parser hermes"
    )
    card = (out / "README.md").read_text("utf-8")
    assert "vllm serve ./out" in card
    assert str(project.root) not in card
    assert header_of(card)["library_name"] == "transformers"


def test_what_is_not_on_record_is_said_and_not_invented(project):
    result = export(project)

    card = (project.root / "out" / "README.md").read_text("utf-8")
    header = header_of(card)
    assert "license" not in header
    assert "base_model" not in header
    assert "synthetic-data" not in header["tags"]
    assert not result.synthetic
    assert result.licence is None
    assert result.teachers == []
    assert "| teacher | unknown |" in card
    assert "The origin of train.jsonl is unknown." in card
    assert "is unknown: look it up before" in card
    assert "is unknown: look it up before publishing" in result.warnings[0]
    assert result.warnings[1] == NO_EVALUATION


def test_a_licence_in_config_yml_is_shown_as_the_users_statement(project):
    path = project.runs / "run-1" / "config.json"
    config = json.loads(path.read_bytes())
    config["model"]["license"] = "cc-by-4.0"
    path.write_text(json.dumps(config), "utf-8")

    result = export(project)

    card = (project.root / "out" / "README.md").read_text("utf-8")
    assert result.licence == header_of(card)["license"] == "cc-by-4.0"
    assert "Base model: cc-by-4.0, according to the user's config.yml." in card
    other = export(project, output="other", licence="mit")
    assert other.licence == "mit"


def test_the_card_shows_evaluations_of_this_checkpoint_only(project):
    right = [answer(i, is_right=i < 18) for i in range(20)]
    write_evaluation(project.runs, "evaluate-a", right, model="run-1", data="heldout.jsonl")
    folder = "runs/run-1/checkpoints/final"
    write_evaluation(project.runs, "evaluate-b", right[:10], minute=1, model=folder)
    write_evaluation(project.runs, "evaluate-c", right, model="demo/student")
    (project.runs / "evaluate-broken").mkdir()
    (project.runs / "evaluate-broken" / "evaluation.json").write_text("{", encoding="utf-8")

    result = export(project)

    card = (project.root / "out" / "README.md").read_text("utf-8")
    rows = [line for line in card.splitlines() if "evaluate-" in line]
    assert result.evaluations == 2
    assert NO_EVALUATION not in result.warnings
    assert rows[0].startswith("| runs/run-1/checkpoints/final | heldout.jsonl | 10 | 1.000 [")
    assert rows[1].startswith("| run-1 | heldout.jsonl | 20 | 0.900 [")
    assert rows[1].endswith("| unknown | evaluate-a |")


def test_the_card_says_what_a_task_costs_and_what_else_was_measured(project):
    right = [answer(i, is_right=i < 18) for i in range(20)]
    cost = TaskCost(usd=0.001, seconds=2.0, machine_seconds=0.5, tokens=300, is_local=False)
    share = share_estimate(9, 10)
    guard = GuardResult(data="guard.jsonl", accuracy=share, over_calling=share_estimate(0, 10))
    measured = {"per_task": cost, "sampled_accuracy": share, "guard": guard}
    write_evaluation(project.runs, "evaluate-a", right, model="run-1", measured=measured)

    export(project)

    card = (project.root / "out" / "README.md").read_text("utf-8")
    assert (
        "Run evaluate-a also measured: at temperature 1: 90.0% [59.6%, 98.2%]; guard set: 90.0% "
        "[59.6%, 98.2%] right, needless tool calls at 0.0% [0.0%, 27.8%]; a task: 0.5 s (2 s "
        "from prompt to answer), $0.001, 300 tokens."
    ) in card


def test_the_costs_of_a_model_stand_beside_those_of_its_teacher_on_the_same_prompts(project):
    right = [answer(i, is_right=True) for i in range(5)]

    def measured(usd):
        cost = TaskCost(usd=usd, seconds=2.0, machine_seconds=0.5, tokens=300, is_local=False)
        return {"measured": {"per_task": cost}}

    name = "final: SFT + on-policy T1 + T1.5"
    fields = measured(0.01) | {"name": name}
    write_evaluation(project.runs, "evaluate-a", right, model="run-1", **fields)
    write_evaluation(project.runs, "evaluate-b", right, model="big", **measured(0.02))
    write_evaluation(project.runs, "evaluate-c", right, model="other", **measured(9))
    checkpoint = locate_model(project, "run-1")
    history = read_history(project, checkpoint, adapter_base(project, checkpoint))
    assert history.costs is None
    (stage,) = history.stages
    taught = replace(history, stages=(replace(stage, teacher="big"),))
    sentence = cost_comparison(project, taught)
    assert sentence.startswith(
        f"Per task, {name} takes 0.5 s (2 s from prompt to answer) and $0.01, big 0.5 s (2 s "
    )


def test_an_evaluation_of_a_former_export_counts_for_the_checkpoint(project):
    export(project)
    rows = [answer(i, is_right=True) for i in range(5)]
    write_evaluation(project.runs, "evaluate-out", rows, model="out")

    assert export(project, "export-2", output="again").evaluations == 1


def test_the_lineage_of_an_export_leads_to_the_prompts(project):
    export(project)

    out = project.root / "out"
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.output.sha256 == record_folder(out).sha256
    lineage = show_lineage(project, ShowLineage(path="out"))
    assert lineage.root.made_by == "export_model"
    checkpoint = lineage.root.inputs[0]
    assert checkpoint.made_by == "start_training"
    assert lineage.problems == []


def test_an_adapter_names_its_base_and_how_to_serve_it(project, made):
    result = export(project, format="adapter")

    base = made.config["model"]["path"]
    config = json.loads((project.root / "out" / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == base
    assert result.read_back is None
    assert result.serve == (
        f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules out=out "
        "--dtype float32 --enable-auto-tool-choice --tool-call-parser hermes"
    )
    assert (
        f"the adapter needs its base model at {base}; an export with format=merged does not"
        in result.warnings
    )
    card = (project.root / "out" / "README.md").read_text("utf-8")
    assert header_of(card)["library_name"] == "peft"
    assert base not in card


@pytest.mark.parametrize(
    ("fields", "problem", "fix"),
    [
        ({"model": "run-2"}, "there is no model 'run-2'", "the id of a finished training run"),
        ({"model": "Qwen/Qwen3-0.6B"}, "is on the model hub", "folder of a checkpoint"),
        ({"output": "../out"}, "is outside the workspace", "inside the workspace"),
        ({"output": "."}, "exists and is not an export", "a new folder"),
        ({"output": "config.yml"}, "exists and is not an export", "a new folder"),
        ({"output": "runs/run-1"}, "exists and is not an export", "a new folder"),
        ({"format": "adapter", "precision": "bf16"}, "format adapter", "leave precision out"),
        ({"llama_cpp": "llama.cpp"}, "llama_cpp needs format gguf", "leave llama_cpp out"),
        ({"format": "gguf", "llama_cpp": "none"}, "llama_cpp 'none' does not exist", "check the"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_next_step(project, fields, problem, fix):
    before = {path: path.stat().st_mtime for path in project.root.rglob("*") if path.is_file()}
    with pytest.raises(EngineError) as caught:
        export(project, **fields)
    assert problem in caught.value.problem
    assert fix in caught.value.fix
    assert before == {p: p.stat().st_mtime for p in project.root.rglob("*") if p.is_file()}


def test_full_weights_have_no_adapter_to_export(tmp_path, tiny_models):
    workspace = trained(tmp_path, tiny_models.folder("llama"), rank=0).workspace
    with pytest.raises(InputError, match="all its weights were trained"):
        export(workspace, format="adapter")
    assert export(workspace).serve.startswith("vllm serve out ")


def test_an_export_is_replaced_by_a_new_one_but_not_with_a_users_changes(project):
    export(project, format="adapter")
    export(project, "export-2")
    out = project.root / "out"
    assert "model.safetensors" in names_in(out)
    assert "adapter_config.json" not in names_in(out)

    (out / "README.md").write_text("my own words", encoding="utf-8")
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(
        InputError, match=r"added or changed since the export: README\.md, notes\.txt"
    ):
        export(project, "export-3")
    assert (out / "notes.txt").read_text("utf-8") == "mine"


def test_a_cancelled_export_leaves_nothing_and_keeps_the_one_before(project):
    export(project)
    reported = names_in(project.root)
    for after in range(4):
        requested = iter([False] * after)
        with pytest.raises(RunCancelledError):
            export(
                project, "export-2", KeptReporter(lambda requested=requested: next(requested, True))
            )
        assert names_in(project.root) == reported
    AutoModelForCausalLM.from_pretrained(project.root / "out")


def test_a_cut_checkpoint_is_refused_before_anything_is_loaded(project):
    weights = project.runs / "run-1/checkpoints/final/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="is damaged"):
        export(project, format="adapter")


def test_a_full_disk_leaves_the_former_export_and_says_what_to_do(project):
    export(project)
    reported = names_in(project.root)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(RunError) as caught:
            export(project, "export-2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written" in caught.value.problem
    assert "free space" in caught.value.fix
    assert names_in(project.root) == reported
    AutoModelForCausalLM.from_pretrained(project.root / "out")

"""A base model is given a chat template, which its checkpoints and exports keep."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from fakes.base_models import save_base
from fakes.conversations import answer, user
from fakes.exports import ROWS
from fakes.gguf_files import write_gguf
from fakes.reporters import KeptReporter
from fakes.tiny_models import TinyModels
from fakes.training import Project, make_project
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.template import NAMED_TEMPLATES, template_file
from stillroom.errors import ConfigError, InputError, RunError
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.models.chat_template import template_source
from stillroom.models.load import load_model, load_tokenizer
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.train.config.request import PlanTraining, plan_request
from stillroom.train.planning.plan import plan_training


@pytest.fixture
def base(tmp_path: Path, tiny_models: TinyModels) -> Path:
    return save_base(tiny_models, tmp_path / "project" / "base")


@pytest.fixture
def project(base: Path) -> Project:
    model = {"qlora_rank": 4, "chat_template": "chatml"}
    made = make_project(base.parent, "sft", Path("base"), model=model)
    made.write(ROWS[:8])
    return made


def planned(project: Project, template: str) -> None:
    project.write_config()
    plan_training(project.workspace, PlanTraining(overrides=(f"model.chat_template={template}",)))


def refuse_another_template(project: Project, model: str, own: str = "chatml") -> None:
    """Checks that a trained model is sampled only with the template that it was trained with."""
    location = locate_model(project.workspace, model)
    for name in NAMED_TEMPLATES:
        template = template_source(project.workspace, name)
        refused = pytest.raises(ConfigError, match=f"not the template that '{model}' was trained")
        with nullcontext() if name == own else refused:
            load_model(project.workspace, location, template=template)


def test_a_template_that_leaves_tools_out_is_replaced_by_chatml_only(tmp_path, tiny_models):
    project = make_project(tmp_path, "sft", tiny_models.folder("llama", "toolless"))
    project.write(ROWS[:8])
    project.train()

    refuse_another_template(project, "run-1", own="chatml")


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_checkpoints_carry_the_template_so_that_nothing_else_is_needed(project, name):
    project.config["model"]["chat_template"] = name
    project.train()

    loaded = load_model(project.workspace, locate_model(project.workspace, "run-1"))

    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}[name]
    assert loaded.tokenizer.chat_template == template_file(name).read_text("utf-8")
    named = {loaded.tokenizer.convert_ids_to_tokens(token) for token in loaded.stop_ids}
    assert named == {"<|endoftext|>", end}
    refuse_another_template(project, "run-1", own=name)
    [row] = ChatRenderer(loaded.tokenizer).sequences([user("Hello"), answer("Yes.")], [])
    trained = [token for token, is_trained in zip(row.ids, row.trained, strict=True) if is_trained]
    assert loaded.tokenizer.decode(trained) == f"Yes.{end}"


def test_an_export_has_the_template_and_stops_at_its_end(project):
    project.train()
    folder = project.root / "runs" / "export-1"
    folder.mkdir()
    request = ExportModel(model="run-1", output="out")

    export_model(project.workspace, request, folder=folder, reporter=KeptReporter())

    out = ModelLocation("out", str(project.root / "out"), is_local=True)
    tokenizer = load_tokenizer(out)
    refuse_another_template(project, "out")
    settings = json.loads((out.path / "generation_config.json").read_bytes())
    ends = tokenizer.convert_ids_to_tokens(settings["eos_token_id"])
    assert tokenizer.chat_template == template_file("chatml").read_text("utf-8")
    assert sorted(ends) == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize("kind", ["file", "folder", "gguf", "demo"])
def test_a_template_is_taken_from_a_file_or_from_another_model(
    project, tiny_models, kind, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tiny_models.load("llama", "gemma")
    text = other.tokenizer.chat_template
    match kind:
        case "file":
            name = "mine.jinja"
            (project.root / name).write_text(text, "utf-8")
        case "folder":
            name = str(tiny_models.folder("llama", "gemma"))
        case "gguf":
            name = "other.gguf"
            write_gguf(project.root / name, other)
        case _:
            name = "demo/teacher"
            text = load_tokenizer(locate_model(project.workspace, name)).chat_template
    project.config["model"]["chat_template"] = name
    project.train()

    assert load_tokenizer(locate_model(project.workspace, "run-1")).chat_template == text


def test_a_template_whose_end_is_no_token_is_refused_with_those_that_are(project):
    text = template_file("chatml").read_text("utf-8").replace("<|im_end|>", "<|done|>")
    (project.root / "mine.jinja").write_text(text, "utf-8")

    with pytest.raises(ConfigError, match=r"ends an answer with '<\|done\|>'") as caught:
        planned(project, "mine.jinja")
    assert "<|im_end|>" in caught.value.fix
    assert "<|im_start|>" not in caught.value.fix
    project.config["model"]["chat_template"] = "mine.jinja"
    with pytest.raises(ConfigError, match="not a special token of 'base'"):
        project.train()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("chatmll", ConfigError), ("none.jinja", InputError), (".env", ConfigError)],
)
def test_a_template_that_is_not_there_is_refused_before_the_run(project, name, kind):
    (project.root / ".env").write_text("KEY=secret", "utf-8")
    project.write_config()
    request = PlanTraining(overrides=(f"model.chat_template={name}",))

    with pytest.raises(kind, match=r"model\.chat_template") as caught:
        plan_request(project.workspace, request)
    assert "secret" not in str(caught.value)


def test_a_template_file_is_an_input_of_the_run(project):
    (project.root / "mine.jinja").write_text(template_file("chatml").read_text("utf-8"), "utf-8")
    project.write_config()
    request = PlanTraining(overrides=("model.chat_template=mine.jinja",))

    inputs = plan_request(project.workspace, request).inputs

    assert project.root / "mine.jinja" in inputs


def test_a_run_is_not_resumed_with_another_template(project):
    (project.root / "mine.jinja").write_text(template_file("chatml").read_text("utf-8"), "utf-8")
    project.config["model"]["chat_template"] = "mine.jinja"
    project.config["trainer"]["save_step"] = 1
    project.train()
    shutil.rmtree(project.checkpoint())
    (project.root / "mine.jinja").write_text(template_file("gemma").read_text("utf-8"), "utf-8")

    with pytest.raises(RunError, match=r"mine\.jinja"):
        project.train("run-2", resume="run-1")
    project.config["model"]["chat_template"] = "gemma"
    with pytest.raises(RunError, match=r"model\.chat_template was 'mine\.jinja' and is 'gemma'"):
        project.train("run-2", resume="run-1")


def test_a_plan_warns_where_an_adapter_has_to_teach_an_end_that_the_base_never_writes(project):
    project.write_config()
    plans = {
        template: plan_training(
            project.workspace,
            PlanTraining(overrides=(f"model.chat_template={template}", *more)),
        )
        for template, more in {
            "chatml": (),
            "gemma": (),
            "llama3": ("model.qlora_rank=0",),
        }.items()
    }

    warned = {
        name: [note for note in plan.notes if "trains neither the embeddings" in note]
        for name, plan in plans.items()
    }
    assert warned["chatml"] == []
    assert warned["llama3"] == []
    [note] = warned["gemma"]
    assert note.startswith("where the first answers end, the student gives <end_of_turn> a prob")
    assert "(mean of 4)" in note

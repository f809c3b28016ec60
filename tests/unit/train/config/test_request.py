import pytest

from fakes.conversations import answer, user
from fakes.rollout_rows import rollout_row
from fakes.training import PRICE_TOOL, make_project
from stillroom.data.inspect import InspectExamples
from stillroom.data.validate import ValidateDataset, validate_dataset
from stillroom.errors import DataError, ModelError
from stillroom.jobs.child_work import inspect_examples
from stillroom.train.config.request import StartTraining, plan_request


@pytest.fixture
def project(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    # Nothing is loaded to make a plan, so this is enough of a model.
    (model / "config.json").write_text("{}", encoding="utf-8")
    project = make_project(tmp_path, "sft", model, teacher={"path": str(model)})
    project.write([{"messages": [user("a"), answer("b")]}])
    return project


def plan(project, *overrides):
    project.write_config()
    return plan_request(project.workspace, StartTraining(overrides=overrides))


def test_the_users_tools_and_rewards_are_for_distill(project, tmp_path):
    for name in ("tools.py", "rewards.py"):
        (tmp_path / name).write_text("", encoding="utf-8")

    found = plan(project)
    assert (found.tools_file, found.rewards_file) == (None, None)

    project.write([{"prompt": "a"}])
    found = plan(project, "dataset_type=distill")
    assert found.code_files == [tmp_path / "tools.py", tmp_path / "rewards.py"]


def test_rows_of_another_method_are_refused_before_anything_is_loaded(project):
    with pytest.raises(DataError, match=r"train\.jsonl:1: prompt"):
        plan(project, "dataset_type=dpo")


@pytest.mark.parametrize("key", ["model.path", "teacher.path"])
def test_a_model_that_does_not_exist_is_refused_before_anything_is_loaded(project, key):
    project.write([{"prompt": "a"}])

    with pytest.raises(ModelError, match="there is no model 'nowhere'"):
        plan(project, "dataset_type=distill", f"{key}=nowhere")


NAMING_ROW = {
    "messages": [user("What is a lamp?"), answer("12")],
    "tools": ["price"],
    "metadata": {"teacher": "openai/gpt-4o-mini"},
}


def test_rows_that_name_tools_get_those_of_tools_py_and_it_is_said(project, tmp_path):
    project.write([NAMING_ROW])
    with pytest.raises(DataError, match=r"there is no tools\.py"):
        plan(project)
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    found = plan(project)
    (row,) = found.load_rows(found.train_file)

    assert row.tools[0]["function"]["description"] == "The price of an item."
    assert found.code_files == [tmp_path / "tools.py"]
    assert found.notes == (
        "rows of train.jsonl name their tools: the schemas are taken from tools.py",
    )


def test_pairs_that_name_tools_get_those_of_tools_py_too(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = make_project(tmp_path, "dpo", clerk)
    asked = [user("What is a lamp?")]
    answers = {"chosen": [answer("12")], "rejected": [answer("7")]}
    project.write([{"prompt": asked, "tools": ["price"], **answers}])
    with pytest.raises(DataError, match=r"there is no tools\.py"):
        plan(project)
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    found = plan(project)
    (pair,) = found.load_pairs(found.train_file)
    report = validate_dataset(project.workspace, ValidateDataset(path="train.jsonl")).report
    request = InspectExamples(path="train.jsonl", model=str(clerk))
    (example,) = inspect_examples(project.workspace, request).page.examples

    assert pair.tools[0]["function"]["description"] == "The price of an item."
    assert found.code_files == [tmp_path / "tools.py"]
    assert found.notes[0].startswith("rows of train.jsonl name their tools: ")
    assert (report.good, example.problem) == (1, None)
    assert "The price of an item." in example.text


def test_rollouts_that_are_trained_as_they_came_are_said_to_be(project):
    rows = [rollout_row(reward=0.0, success=False), rollout_row()]
    project.write(rows)

    (note,) = plan(project).notes

    assert note.startswith("train.jsonl holds unfiltered rollouts: unsuccessful ones are")


def test_the_mask_of_a_row_that_names_its_tools_shows_their_schemas(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = make_project(tmp_path, "sft", clerk)
    project.write([NAMING_ROW], name="rollouts.jsonl")
    request = InspectExamples(path="rollouts.jsonl", model=str(clerk))

    without = inspect_examples(project.workspace, request).page.examples[0]
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    example = inspect_examples(project.workspace, request).page.examples[0]

    assert "no tools.py" in (without.problem or "")
    assert example.problem is None
    assert "The price of an item." in example.text

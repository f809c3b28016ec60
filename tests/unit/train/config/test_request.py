import pytest

from fakes.conversations import answer, user
from fakes.training import make_project
from stillroom.errors import ConfigError, DataError, InputError, ModelError
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


def test_a_plan_says_where_everything_is(project, tmp_path):
    found = plan(project)

    assert found.config_file == tmp_path / "config.yml"
    assert found.train_file == tmp_path / "train.jsonl"
    assert found.config.dataset_type == "sft"


def test_the_training_file_is_beside_the_configuration(project, tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    project.write_config()
    (tmp_path / "config.yml").rename(folder / "config.yml")
    (tmp_path / "train.jsonl").rename(folder / "train.jsonl")

    request = StartTraining(config="inner/config.yml")

    assert plan_request(project.workspace, request).train_file == folder / "train.jsonl"


def test_the_users_tools_and_rewards_are_for_distill(project, tmp_path):
    for name in ("tools.py", "rewards.py"):
        (tmp_path / name).write_text("", encoding="utf-8")

    found = plan(project)
    assert (found.tools_file, found.rewards_file) == (None, None)

    project.write([{"prompt": "a"}])
    found = plan(project, "dataset_type=distill")
    assert found.code_files == [tmp_path / "tools.py", tmp_path / "rewards.py"]


def test_prompts_may_be_a_text_file(project, tmp_path):
    (tmp_path / "prompts.txt").write_text("What is it?\nHow many?\n", encoding="utf-8")

    found = plan(project, "dataset_type=distill", "data.train_file=prompts.txt")

    assert found.train_file == tmp_path / "prompts.txt"


def test_a_missing_configuration_is_refused(project):
    with pytest.raises(InputError, match=r"config 'nothing\.yml' does not exist"):
        plan_request(project.workspace, StartTraining(config="nothing.yml"))


def test_rows_of_another_method_are_refused_before_anything_is_loaded(project):
    with pytest.raises(DataError, match=r"train\.jsonl:1: prompt"):
        plan(project, "dataset_type=dpo")


def test_an_empty_training_file_is_refused_before_anything_is_loaded(project):
    project.write([])

    with pytest.raises(DataError, match="holds no rows"):
        plan(project)


@pytest.mark.parametrize("key", ["model.path", "teacher.path"])
def test_a_model_that_does_not_exist_is_refused_before_anything_is_loaded(project, key):
    project.write([{"prompt": "a"}])

    with pytest.raises(ModelError, match="there is no model 'nowhere'"):
        plan(project, "dataset_type=distill", f"{key}=nowhere")


def test_an_api_teacher_is_refused_with_the_off_policy_way(project):
    project.write([{"prompt": "a"}])

    with pytest.raises(ConfigError, match="Unsupported teacher model 'gpt-5'"):
        plan(project, "dataset_type=distill", "teacher.path=gpt-5")

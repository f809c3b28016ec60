"""Several datasets in one run, each with a teacher of its own."""

from collections import Counter

import pytest

from fakes.model_server import FakeModelServer
from fakes.training import make_project
from stillroom.data.formats import load_datasets
from stillroom.errors import ConfigError
from stillroom.train.config.file import load_config
from stillroom.train.config.request import PlanTraining, plan_request
from stillroom.train.on_policy.student_rollouts import prompt_batches
from stillroom.train.planning.plan import plan_training

FILES = ["shop.jsonl", "maths.jsonl"]


def distill(tmp_path, student, teacher, *, sizes=(4, 4), **sections):
    project = make_project(
        tmp_path,
        "distill",
        student,
        **{
            "data": {"train_file": FILES, "batch_size": 4, "group_size": 2},
            "teacher": teacher,
            "rollout": {"max_tokens": 8},
            "algorithm": {"loss_fn": "importance_sampling"},
            **sections,
        },
    )
    for name, size in zip(FILES, sizes, strict=True):
        rows = [
            {"prompt": f"{name} {i}?", "metadata": {"expected_answer": "12"}} for i in range(size)
        ]
        project.write(rows, name=name)
    project.write_config()
    return project


def test_each_dataset_is_scored_by_its_own_teacher(tmp_path, tiny_models):
    """The student itself, which has nothing to teach, and one that has, each behind a server."""
    student = tiny_models.folder("llama", "chatml")
    with (
        FakeModelServer(tiny_models.load("llama", "chatml")) as one,
        FakeModelServer(tiny_models.load("llama", "chatml", seed=1)) as two,
    ):
        teacher = {
            "path": ["served", "served"],
            "provider": "vllm",
            "base_url": [one.base_url, two.base_url],
        }
        project = distill(tmp_path, student, teacher)
        project.train()

    first = project.reporter.measured[0]
    assert first["teacher_kl/dataset_0"] == pytest.approx(0.0, abs=1e-5)
    assert first["teacher_kl/dataset_1"] > 0.1
    assert 0 < first["teacher_kl"] < first["teacher_kl/dataset_1"]
    assert {"reward/dataset_0", "reward/dataset_1"} <= first.keys()


@pytest.mark.parametrize("sizes", [(4, 4), (6, 2), (12, 4), (5, 3)])
def test_batches_have_the_datasets_in_proportion(tmp_path, tiny_models, sizes):
    folder = tiny_models.folder("llama", "chatml")
    distill(tmp_path, folder, {"path": str(folder)}, sizes=sizes, trainer={"num_epochs": 2})
    tasks = load_datasets([tmp_path / name for name in FILES])

    batches = prompt_batches(tasks, load_config(tmp_path / "config.yml"))

    share = sizes[0] / sum(sizes)
    for batch in batches:
        in_first = sum(task.dataset == 0 for task in batch)
        assert abs(in_first - share * len(batch)) <= 1
    seen = Counter((task.dataset, task.task_id) for batch in batches for task in batch)
    assert set(seen.values()) == {2}
    assert len(seen) == sum(sizes)


def test_a_plan_counts_all_datasets_and_checks_all_teachers(tmp_path, tiny_models):
    student = tiny_models.folder("llama", "chatml")
    other = tiny_models.folder("llama", "chatml", seed=1)
    project = distill(tmp_path, student, {"path": [str(student), str(other)]}, sizes=(6, 2))

    reported = plan_training(project.workspace, PlanTraining())

    assert (reported.rows, reported.steps) == (8, 2)
    assert reported.memory_parts_gb["teacher"] == 2 * reported.memory_parts_gb["weights"]
    assert len(reported.checks) == 3
    assert reported.checks[2].startswith("on ")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["teacher.path=[demo/teacher]"],
            "teacher.path is a list of 1, but data.train_file has 2",
        ),
        (["dataset_type=sft"], "needs dataset_type distill"),
        (["data.train_file=[shop.jsonl, shop.jsonl]"], "and no file twice"),
        (["data.train_file=[]"], "at least one file"),
        (["data.train_file=[shop.jsonl, none.jsonl]"], "'none.jsonl' does not exist"),
        (["teacher.path=[demo/teacher, gpt-5]"], "Unsupported teacher model 'gpt-5'"),
        (
            ["teacher.provider=vllm", "teacher.path=a", "teacher.base_url=[http://x/v1]"],
            "base_url is a list of 1",
        ),
    ],
)
def test_lists_that_do_not_go_together_are_refused(tmp_path, tiny_models, overrides, words):
    folder = tiny_models.folder("llama", "chatml")
    project = distill(tmp_path, folder, {"path": str(folder)})

    with pytest.raises(ConfigError) as caught:
        plan_request(project.workspace, PlanTraining(overrides=tuple(overrides)))
    assert words in str(caught.value)


def test_a_teacher_in_four_bits_or_spread_teaches_nearly_the_same(tmp_path, tiny_models):
    student = tiny_models.folder("llama", "chatml")
    other = str(tiny_models.folder("llama", "chatml", seed=1))
    measured = {}
    kinds = {"whole": {}, "small": {"quantization": "nf4"}, "spread": {"spread": True}}
    for name, more in kinds.items():
        (tmp_path / name).mkdir()
        project = distill(tmp_path / name, student, {"path": other, **more})
        project.train()
        measured[name] = project.reporter.measured[0]["teacher_kl"]

    assert measured["small"] != measured["whole"]
    assert measured["small"] == pytest.approx(measured["whole"], rel=0.3)
    assert measured["spread"] == pytest.approx(measured["whole"], rel=1e-6)

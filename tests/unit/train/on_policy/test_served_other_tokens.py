"""A teacher behind a server whose tokenizer or chat template is not the student's."""

import pytest

from fakes.model_server import FakeModelServer
from fakes.training import PRICE_TOOL, make_project
from stillroom.errors import ConfigError, EngineError
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.plan import plan_training

CLOCKS = {"sample_s", "update_s", "tokens_per_s", "memory_gb"}


@pytest.fixture
def folders(tiny_models):
    return tiny_models.folder("llama", "clerk"), tiny_models.folder("llama", "llama3", seed=1)


@pytest.fixture
def loaded(tiny_models):
    return tiny_models.load("llama", "llama3", seed=1)


def project_of(root, student, teacher, **sections):
    root.mkdir(exist_ok=True)
    project = make_project(
        root,
        "distill",
        student,
        **{
            "data": {"batch_size": 4, "group_size": 1},
            "rollout": {"max_tokens": 10},
            **sections,
            "teacher": {"tokens": "reread", **teacher},
        },
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(4)])
    return project


def served(server, folder, provider="vllm", **more):
    own = {"path": "served", "provider": provider, "base_url": server.base_url}
    return own | {"tokenizer": str(folder)} | more


def numbers(project):
    [metrics] = project.reporter.measured
    return {name: value for name, value in metrics.items() if name not in CLOCKS}


def test_a_server_that_lists_all_tokens_teaches_what_the_teacher_here_does(
    tmp_path, folders, loaded
):
    student, teacher = folders
    rollout = {"max_turns": 2, "max_tokens": 8}
    here = project_of(tmp_path / "here", student, {"path": str(teacher)}, rollout=rollout)
    size = loaded.model.config.vocab_size
    algorithm = {"loss_fn": "byte_reverse_kl", "top_k": size}

    with FakeModelServer(loaded, max_logprobs=size) as server:
        there = project_of(
            tmp_path / "there",
            student,
            served(server, teacher, "sglang"),
            algorithm=algorithm,
            rollout=rollout,
        )
        for one in (here, there):
            (one.workspace.root / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
            one.train()

    found, exact = numbers(there), numbers(here)
    assert found.pop("teacher_tail") == pytest.approx(0, abs=1e-5)
    assert found == pytest.approx(exact, rel=1e-3, abs=1e-4)
    assert found["teacher_kl"] > 0.1
    assert found["byte_share"] > 0.9


def test_a_few_listed_tokens_bring_a_student_nearer(tmp_path, folders, loaded):
    student, teacher = folders
    with FakeModelServer(loaded) as server:
        project = project_of(
            tmp_path,
            student,
            served(server, teacher),
            trainer={"num_epochs": 8, "learning_rate": 2e-2, "schedule": "constant"},
        )
        project.train()

    steps = project.reporter.measured
    assert sum(one["teacher_kl"] for one in steps[-3:]) < 0.8 * 3 * steps[0]["teacher_kl"]
    assert all(one["logprob_gap"] < 1e-5 for one in steps)
    assert 0.1 < steps[0]["teacher_tail"] < 1
    assert [one for one in steps if one["failed"]] == []
    asked = [body for path, body in server.requested if path == "/v1/completions"]
    assert {body["prompt_logprobs"] for body in asked} == {16}
    assert any(
        "returns the top 16 tokens at each position; its tokenizer and chat" in n
        for n in project.reporter.notes
    )


def test_a_rollout_that_could_not_be_scored_has_failed(tmp_path, folders, loaded):
    student, teacher = folders
    scored = []

    def before(path, body):
        if path == "/v1/completions":
            scored.append(body)
        is_refused = path == "/v1/completions" and len(scored) == 5
        return (400, {"error": {"message": "no"}}) if is_refused else None

    with FakeModelServer(loaded, before=before) as server:
        project = project_of(tmp_path, student, served(server, teacher))
        project.train()

    assert numbers(project)["failed"] == 1 / 4


def test_with_equal_tokens_the_loss_is_that_over_the_likeliest_tokens(tmp_path, tiny_models):
    folder = tiny_models.folder("llama", "chatml")
    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1)) as server:
        for name, tokens in (("bytes", "reread"), ("tokens", "same")):
            project = project_of(tmp_path / name, folder, served(server, folder, tokens=tokens))
            project.train()
            if tokens == "reread":
                ours = numbers(project)
                notes = project.reporter.notes

    assert ours == pytest.approx(numbers(project), abs=1e-6)
    assert any("student's own tokens (top_k_reverse_kl)" in note for note in notes)


def test_turns_beyond_the_servers_context_are_not_compared(tmp_path, folders, loaded):
    student, teacher = folders
    with FakeModelServer(loaded, max_model_len=80) as server:
        project = project_of(
            tmp_path,
            student,
            served(server, teacher),
            rollout={"max_turns": 6, "max_tokens": 8, "termination_policy": "max_turns"},
        )
        project.train()

    found = numbers(project)
    assert found["failed"] == 0
    assert found["not_compared"] > 0.3


def test_a_plan_says_what_the_server_answered(tmp_path, folders, loaded):
    student, teacher = folders
    with FakeModelServer(loaded) as server:
        project = project_of(tmp_path, student, served(server, teacher))
        project.write_config()

        checks = plan_training(project.workspace, PlanTraining()).checks

    assert any("scores the student's text with its own tokenizer" in check for check in checks)
    assert any(
        f"its tokenizer and chat template are those of {teacher}" in check for check in checks
    )


@pytest.mark.parametrize(
    ("options", "teacher", "algorithm", "said"),
    [
        ({}, {"tokenizer": None}, {}, "set teacher.tokenizer to the folder or hub id"),
        ({}, {"tokenizer": "clerk"}, {}, "have different tokenizers"),
        ({"max_logprobs": 8}, {}, {}, r"allow 16 logprobs \(vLLM: --max-logprobs\)"),
        ({}, {"path": "another"}, {}, "serves no model 'another'"),
    ],
)
def test_a_server_that_cannot_be_read_from_is_refused_before_a_rollout(
    tmp_path, folders, loaded, options, teacher, algorithm, said
):
    student, folder = folders
    if teacher.get("tokenizer") == "clerk":
        teacher = {"tokenizer": str(student)}
    with FakeModelServer(loaded, **options) as server:
        settings = served(server, folder, **teacher)
        settings = {name: value for name, value in settings.items() if value is not None}
        project = project_of(tmp_path, student, settings, algorithm=algorithm)

        with pytest.raises(EngineError, match=said):
            project.train()
    assert project.reporter.measured == []


def test_a_server_that_cannot_cut_texts_is_noted(tmp_path, folders, loaded):
    student, teacher = folders
    with FakeModelServer(loaded, has_tokenize=False) as server:
        project = project_of(tmp_path, student, served(server, teacher))
        project.train()

    assert any(
        "has no /tokenize endpoint, so its tokenizer was not" in n for n in project.reporter.notes
    )


def test_the_number_of_listed_tokens_is_of_a_server(tmp_path, folders):
    student, teacher = folders
    project = project_of(
        tmp_path,
        student,
        {"path": str(teacher)},
        algorithm={"loss_fn": "byte_reverse_kl", "top_k": 8},
    )

    with pytest.raises(ConfigError, match="top_k has no effect"):
        project.train()

"""On-policy distillation with a teacher behind a server."""

import pytest

from fakes.model_server import FakeModelServer
from fakes.training import make_project
from stillroom import api
from stillroom.errors import ConfigError, RunError
from stillroom.train.config.request import PlanTraining, plan_request

CLOCKS = {"sample_s", "update_s", "tokens_per_s", "memory_gb"}


def distill(tmp_path, student, teacher, **sections):
    """A project whose rollouts have several turns."""
    project = make_project(
        tmp_path,
        "distill",
        student,
        **{
            "teacher": teacher,
            "rollout": {"max_turns": 2, "max_tokens": 8, "termination_policy": "max_turns"},
            "data": {"batch_size": 4, "group_size": 2},
            "algorithm": {"loss_fn": "importance_sampling"},
            **sections,
        },
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(8)])
    return project


def served(server, provider="vllm", **more):
    return {"path": "served", "provider": provider, "base_url": server.base_url, **more}


def measured(project):
    return [
        {name: value for name, value in metrics.items() if name not in CLOCKS}
        for metrics in project.reporter.measured
    ]


@pytest.mark.parametrize("provider", ["vllm", "sglang"])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "top_k_reverse_kl"])
def test_a_served_teacher_teaches_what_it_teaches_in_this_process(
    tmp_path, tiny_models, provider, loss_fn
):
    student = tiny_models.folder("llama", "chatml")
    teacher = tiny_models.folder("llama", "chatml", seed=1)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    algorithm = {"loss_fn": loss_fn}
    here = distill(tmp_path / "here", student, {"path": str(teacher)}, algorithm=algorithm)
    here.train()

    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1)) as server:
        there = distill(tmp_path / "there", student, served(server, provider), algorithm=algorithm)
        there.train()

    first, second = zip(measured(there), measured(here), strict=True)
    assert first[0] == pytest.approx(first[1], abs=1e-5)
    assert first[0]["teacher_kl"] > 0.1
    assert first[0]["turns"] > 1
    # Adam makes whole steps of gradients that differ in their last digit.
    assert second[0] == pytest.approx(second[1], rel=1e-3, abs=1e-3)


# Asked before the first rollout.
NUM_CHECKS = 3


def refusing(which):
    """Refuses the rollouts' scores, counted from 0, of which `which` says so."""
    scored = []

    def before(path, _body):
        if path != "/v1/completions":
            return None
        scored.append(path)
        number = len(scored) - NUM_CHECKS - 1
        return (400, {"error": {"message": "no"}}) if number >= 0 and which(number) else None

    return before


def test_a_rollout_that_could_not_be_scored_has_failed_and_is_not_trained_on(tmp_path, tiny_models):
    before = refusing(lambda number: number % 8 == 2)

    with FakeModelServer(tiny_models.load("llama", "chatml"), before=before) as server:
        project = distill(tmp_path, tiny_models.folder("llama", "chatml"), served(server))
        project.train()

    assert [metrics["failed"] for metrics in project.reporter.measured] == [1 / 8, 1 / 8]


def test_an_iteration_that_lost_more_than_half_of_its_rollouts_is_not_trained_on(
    tmp_path, tiny_models
):
    before = refusing(lambda number: number >= 8 and number % 8 < 5)

    with FakeModelServer(tiny_models.load("llama", "chatml"), before=before) as server:
        project = distill(tmp_path, tiny_models.folder("llama", "chatml"), served(server))
        with pytest.raises(RunError, match="5 of 8 rollouts of iteration 2 failed, more than half"):
            project.train("run-1", "trainer.save_step=1")

    # The iteration before it is kept, and the run resumes there.
    assert len(project.reporter.measured) == 1
    assert project.checkpoints() == ["step_000001"]


def test_a_run_tells_that_it_waits_for_a_server_that_is_down(tmp_path, tiny_models):
    scored = []

    def before(path, _body):
        if path == "/v1/completions":
            scored.append(path)
        # Of more failures than the 8 rollouts of an iteration, two are of one call.
        is_down = NUM_CHECKS < len(scored) <= NUM_CHECKS + 9
        return (503, {"error": "starting"}) if is_down else None

    with FakeModelServer(tiny_models.load("llama", "chatml"), before=before) as server:
        teacher = served(server, concurrency=1)
        project = distill(tmp_path, tiny_models.folder("llama", "chatml"), teacher)
        project.train()

    told = [note for note in project.reporter.notes if "answer" in note]
    assert "does not answer (HTTP 503: " in told[0]
    assert "the run waits up to 60 minutes" in told[0]
    assert "answers again" in told[1]
    assert [metrics["failed"] for metrics in project.reporter.measured] == [0, 0]


def test_a_teacher_whose_server_refuses_everything_ends_the_run(tmp_path, tiny_models):
    before = refusing(lambda _number: True)

    with FakeModelServer(tiny_models.load("llama", "chatml"), before=before) as server:
        project = distill(tmp_path, tiny_models.folder("llama", "chatml"), served(server))
        with pytest.raises(RunError, match="the teacher did not score this rollout: HTTP 400"):
            project.train()
    assert project.reporter.measured == []


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"provider": "vllm", "precision": "fp32"}, "precision needs a teacher in this process"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "base_url needs a served teacher"),
        ({"provider": "anthropic"}, "generate_rollouts"),
        ({"provider": "openai"}, "does not return the log-probability"),
        ({"provider": "tgi"}, "teacher.provider"),
    ],
)
def test_what_a_teacher_section_cannot_mean_is_refused(tmp_path, tiny_models, teacher, words):
    project = distill(tmp_path, tiny_models.folder("llama", "clerk"), {"path": "served", **teacher})
    project.write_config()

    with pytest.raises(ConfigError) as caught:
        plan_request(project.workspace, PlanTraining())
    assert words in str(caught.value)


def test_losses_over_the_whole_vocabulary_are_refused_with_a_server(tmp_path, tiny_models):
    project = distill(
        tmp_path,
        tiny_models.folder("llama", "clerk"),
        {"path": "served", "provider": "vllm"},
        algorithm={"loss_fn": "full_reverse_kl"},
    )
    project.write_config()

    with pytest.raises(ConfigError, match="which servers do not return"):
        plan_request(project.workspace, PlanTraining())


@pytest.mark.usefixtures("warm_python")
def test_a_plans_process_is_given_the_servers_key(tmp_path, tiny_models, monkeypatch):
    """Although it trains on files alone, and has no other secret."""
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1), key="the-key") as server:
        teacher = served(server, api_key_env="VLLM_API_KEY")
        project = distill(tmp_path, tiny_models.folder("llama", "chatml"), teacher)
        project.write_config()

        reported = api.plan_training(project.workspace, api.PlanTraining())

    assert "its tokenizer and chat template are the student's" in reported.checks[0]

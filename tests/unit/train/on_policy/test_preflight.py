"""What is checked of student and teacher before a rollout is paid for."""

import re

import anyio
import pytest

from fakes.model_server import FakeModelServer
from fakes.training import make_project, make_student
from stillroom.errors import EngineError, ModelError, TeacherError
from stillroom.serving.preflight import check_served
from stillroom.train.config.distill_sections import AlgorithmSection, TeacherSection, served_teacher
from stillroom.train.config.request import PlanTraining
from stillroom.train.on_policy.preflight import check_agreement
from stillroom.train.planning.plan import plan_training


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "full_reverse_kl"])
def test_sampler_trainer_and_a_teacher_that_is_the_student_agree(tiny_models, rank, loss_fn):
    student = make_student(tiny_models, tiny_models.folder("qwen3", "chatml"), rank=rank)

    (note,) = check_agreement(student, AlgorithmSection(loss_fn=loss_fn))

    gap, kl = re.findall(r"\d\.\de[-+]\d\d", note)
    assert float(gap) < 1e-5
    assert float(kl) < 1e-5
    assert not any(p.grad is not None for p in student.trainable())


def test_a_sampler_of_other_weights_than_the_trainers_is_refused(tiny_models, monkeypatch):
    student = make_student(tiny_models, tiny_models.folder("llama", "chatml"))
    logprobs = student.head.logits

    def moved(hidden_NH):
        # What trains has drifted from what samples, which has a head of its own.
        return logprobs(hidden_NH) * 1.05

    monkeypatch.setattr(student.head, "logits", moved)

    with pytest.raises(ModelError, match="sampler and trainer differ by") as caught:
        check_agreement(student, AlgorithmSection())
    assert "generate_rollouts" in caught.value.fix


def check(tiny_models, tmp_path, server, *, max_context=256, **more):
    (one,) = TeacherSection(
        path=more.pop("path", "served"),
        provider=more.pop("provider", "vllm"),
        base_url=server.base_url,
        **more,
    ).for_datasets(1)
    student = tiny_models.load("llama", "chatml")
    workspace = tiny_models.workspace
    teacher = served_teacher(workspace, one)

    async def ask():
        with anyio.fail_after(60):
            return await check_served(
                workspace, one.tokenizer, teacher, student.tokenizer, max_context=max_context
            )

    return anyio.run(ask)


@pytest.mark.parametrize("provider", ["vllm", "sglang"])
def test_a_server_of_the_students_family_is_taken_and_told_of(tiny_models, tmp_path, provider):
    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1)) as server:
        (note,) = check(tiny_models, tmp_path, server, provider=provider)

    assert "has a context of 640 tokens" in note
    assert "its tokenizer and chat template are the student's" in note


def test_a_server_that_cannot_cut_text_needs_its_tokenizer_named(tiny_models, tmp_path):
    loaded = tiny_models.load("llama", "chatml", seed=1)
    with FakeModelServer(loaded, has_tokenize=False) as server:
        with pytest.raises(ModelError, match="has no /tokenize endpoint") as caught:
            check(tiny_models, tmp_path, server)
        named = tiny_models.folder("llama", "chatml", seed=1)
        (note,) = check(tiny_models, tmp_path, server, tokenizer=str(named))
        other = tiny_models.folder("llama", "qwen3")
        with pytest.raises(ModelError, match="different chat templates"):
            check(tiny_models, tmp_path, server, tokenizer=str(other))
    assert "teacher.tokenizer" in caught.value.fix
    assert "are those of" in note


def test_a_server_with_another_template_is_refused_where_they_part(tiny_models, tmp_path):
    with (
        FakeModelServer(tiny_models.load("llama", "llama3")) as server,
        pytest.raises(ModelError, match="different chat templates") as caught,
    ):
        check(tiny_models, tmp_path, server)
    assert "differ from index 0 on ('<|im_start|>user" in caught.value.problem
    assert "generate_rollouts" in caught.value.fix


def test_a_name_that_is_not_served_is_told_with_those_that_are(tiny_models, tmp_path):
    with (
        FakeModelServer(tiny_models.load("llama", "chatml")) as server,
        pytest.raises(TeacherError, match="serves no model 'other'; it serves: served"),
    ):
        check(tiny_models, tmp_path, server, path="other")


@pytest.mark.parametrize(("provider", "needed"), [("vllm", 257), ("sglang", 256)])
def test_a_server_that_takes_too_short_conversations_is_refused(
    tiny_models, tmp_path, provider, needed
):
    loaded = tiny_models.load("llama", "chatml")
    with FakeModelServer(loaded, max_model_len=needed - 1) as server:
        with pytest.raises(ModelError, match=f"a context of {needed - 1} tokens") as caught:
            check(tiny_models, tmp_path, server, provider=provider)
        assert "rollout.max_context_window: 255" in caught.value.fix
    with FakeModelServer(loaded, max_model_len=needed) as server:
        assert check(tiny_models, tmp_path, server, provider=provider)


def test_scores_that_change_from_call_to_call_are_refused(tiny_models, tmp_path):
    """As those of a prefix cache that mixes up what it knows of earlier prompts."""
    calls = []

    def shown(path, answer):
        if path == "/v1/completions":
            calls.append(path)
            reported = answer["choices"][0]["prompt_logprobs"]
            for place in reported[1:33] if len(calls) > 1 else []:
                for one in place.values():
                    one["logprob"] -= 2.0
        return answer

    loaded = tiny_models.load("llama", "chatml")
    with (
        FakeModelServer(loaded, shown=shown) as server,
        pytest.raises(TeacherError, match="in different calls") as caught,
    ):
        check(tiny_models, tmp_path, server)
    assert "--no-enable-prefix-caching" in caught.value.fix


def test_nothing_that_answers_is_told_with_its_address(tiny_models, tmp_path):
    with FakeModelServer(tiny_models.load("llama", "chatml")) as server:
        pass
    with pytest.raises(TeacherError, match=r"no response from http://127\.0\.0\.1"):
        check(tiny_models, tmp_path, server)


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_a_plan_and_a_run_ask_the_server_first(tmp_path, tiny_models, family):
    project = make_project(tmp_path, "distill", tiny_models.folder("llama", "chatml"))
    project.write([{"prompt": "a"}] * 4)
    with FakeModelServer(tiny_models.load("llama", family, seed=1)) as server:
        project.config |= {
            "teacher": {"path": "served", "provider": "vllm", "base_url": server.base_url},
            "rollout": {"max_tokens": 4, "max_context_window": 128},
        }
        project.write_config()
        if family == "chatml":
            reported = plan_training(project.workspace, PlanTraining())
            project.train()
            assert reported.checks == project.reporter.notes[1:2]
            assert "sampler and trainer agree" in project.reporter.notes[0]
        else:
            with pytest.raises(EngineError, match="different chat templates"):
                plan_training(project.workspace, PlanTraining())
            with pytest.raises(EngineError, match="different chat templates"):
                project.train()
            assert project.reporter.measured == []


def test_a_teacher_that_ends_its_turns_otherwise_is_refused(tmp_path, tiny_models):
    # The teacher's generation config names one more end of turn.
    teacher = tiny_models.load("llama", "chatml", seed=1)
    teacher.model.generation_config.eos_token_id = [teacher.tokenizer.eos_token_id, 5]
    teacher.model.save_pretrained(tmp_path / "teacher")
    teacher.tokenizer.save_pretrained(tmp_path / "teacher")
    project = make_project(tmp_path, "distill", tiny_models.folder("llama", "chatml"))
    project.config["teacher"] = {"path": str(tmp_path / "teacher")}
    project.write([{"prompt": "a"}] * 4)

    with pytest.raises(ModelError, match="have different end-of-turn tokens") as caught:
        project.train()
    assert "generation_config.json" in caught.value.fix

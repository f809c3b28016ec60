import json

import pytest
from pydantic import ValidationError

from fakes.conversations import answer, user
from fakes.decoding import full_logprobs
from fakes.killed_runs import assert_resumes_exactly
from fakes.students import PROMPTS, make_session, pairs, sample
from fakes.tool_sources import DictTools
from fakes.training import PRICE_TOOL, make_project
from stillroom.train.config.request import PlanTraining
from stillroom.train.config.schema import DistillConfig
from stillroom.train.on_policy.student_policy import Limits, limits_at
from stillroom.train.planning.plan import plan_training


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS), encoding="utf-8")
    return path


def config_with(curriculum):
    return DistillConfig.model_validate(
        {
            "dataset_type": "distill",
            "data": {"batch_size": 1},
            "model": {"path": "m"},
            "teacher": {"path": "t"},
            "rollout": {"max_turns": 4},
            "trainer": {"num_epochs": 1},
            "curriculum": curriculum,
        }
    )


def test_the_teachers_share_falls_to_nothing_in_a_straight_line():
    config = config_with({"teacher_share": 0.8, "teacher_steps": 4})

    shares = [limits_at(config, i).teacher_share for i in range(6)]

    assert shares == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_whose_a_turn_is_follows_from_the_rollouts_key():
    limits = Limits(max_turns=1000, teacher_share=0.3)

    drawn = limits.teacher_turns("task:0", seed=1)

    assert drawn == limits.teacher_turns("task:0", seed=1)
    assert drawn != limits.teacher_turns("task:1", seed=1)
    assert 230 < len(drawn) < 370


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_tokens": 9, "prefix_steps": 3}, "prefix_tokens_end and prefix_steps"),
        (
            {"prefix_tokens": 9, "prefix_tokens_end": 5, "prefix_steps": 3},
            "must be at least prefix_tokens",
        ),
        ({"first_turns": 1}, "first_turns and turn_steps"),
        ({"first_turns": 9, "turn_steps": 3}, "above rollout.max_turns 4"),
        ({"teacher_share": 0.5}, "teacher_share and teacher_steps"),
        ({"teacher_steps": 5}, "teacher_share and teacher_steps"),
    ],
)
def test_half_a_curriculum_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        config_with(changes)


def test_a_prefix_counts_what_the_student_writes_in_all_turns(tmp_path, tiny_models, prompts):
    clerk = tiny_models.folder("llama", "clerk")
    # Each turn of a clerk has two tokens, so the third turn is cut off after one.
    session = make_session(
        tiny_models,
        clerk,
        tmp_path,
        rollout={"max_turns": 6, "max_tokens": 8},
        curriculum={"prefix_tokens": 5},
        data={"group_size": 8},
    )

    sampled = sample(session, prompts, tools=DictTools({"price": "12"}))

    for rollout, mode in pairs(sampled):
        num_sampled = sum(rollout.tokens.sampled)
        assert num_sampled <= 5
        assert mode.is_prefix_cut == (rollout.turns == 3)
        assert num_sampled == (5 if mode.is_prefix_cut else 2 * rollout.turns)
    assert {mode.is_prefix_cut for _, mode in pairs(sampled)} == {True, False}


def test_teacher_turns_are_read_by_both_models_and_trained_by_neither(
    tmp_path, tiny_models, prompts
):
    folder = tiny_models.folder("llama", "clerk")
    teacher = tiny_models.load("llama", "clerk", seed=1)
    session = make_session(
        tiny_models,
        folder,
        tmp_path,
        rollout={"max_turns": 5, "max_tokens": 8},
        curriculum={"teacher_share": 0.5, "teacher_steps": 4},
    )

    sampled = sample(session, prompts, teacher=teacher, tools=DictTools({"price": "12"}))

    num_taught = num_own = 0
    for rollout, mode in pairs(sampled):
        trace = rollout.tokens
        reference = full_logprobs(teacher, trace.ids)
        ours = full_logprobs(session.student.loaded, trace.ids)
        at = 0
        for index, known in enumerate(mode.turns):
            ids = known.turn.token_ids
            while trace.ids[at : at + len(ids)] != ids or (
                trace.sampled[at] == (index in mode.teacher_turns)
            ):
                at += 1
            span = slice(at, at + len(ids))
            at += len(ids)
            if index in mode.teacher_turns:
                assert not any(trace.sampled[span])
                assert known.turn.logprobs == pytest.approx(reference[span], abs=1e-4)
                num_taught += 1
            else:
                assert all(trace.sampled[span])
                assert trace.logprobs[span] == pytest.approx(ours[span], abs=1e-4)
                num_own += 1
        own = sum(
            len(k.turn.token_ids) for i, k in enumerate(mode.turns) if i not in mode.teacher_turns
        )
        assert sum(trace.sampled) == own
    assert num_taught > 2
    assert num_own > 0


def test_a_run_tells_what_its_curriculum_did(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = make_project(
        tmp_path,
        "distill",
        clerk,
        teacher={"path": str(tiny_models.folder("llama", "clerk", seed=1))},
        data={"batch_size": 2, "group_size": 4},
        rollout={"max_turns": 3, "max_tokens": 8},
        curriculum={
            "first_turns": 1,
            "turn_steps": 2,
            "prefix_tokens": 3,
            "prefix_tokens_end": 4,
            "prefix_steps": 3,
            "teacher_share": 0.6,
            "teacher_steps": 3,
        },
    )
    project.write(PROMPTS * 2)
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    project.train()

    reported = project.reporter.measured
    assert [metrics["max_turns"] for metrics in reported] == [1, 2, 3, 3, 3, 3]
    assert [metrics.get("prefix_tokens") for metrics in reported] == [3, 3, 4, None, None, None]
    assert reported[0]["teacher_turns"] > 0
    assert [metrics["teacher_turns"] for metrics in reported[3:]] == [0, 0, 0]
    assert all(metrics["truncated"] == 0 for metrics in reported)
    assert reported[1]["prefix_cut"] > 0
    assert all(metrics["logprob_gap"] < 1e-5 for metrics in reported)


SFT_ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(5)]


def cold_project(tmp_path, tiny_models, **cold_start):
    folder = tiny_models.folder("llama", "chatml")
    project = make_project(
        tmp_path,
        "distill",
        folder,
        teacher={"path": str(tiny_models.folder("llama", "chatml", seed=1))},
        data={"batch_size": 2, "group_size": 2},
        rollout={"max_tokens": 6},
        cold_start={"train_file": "sft.jsonl", "num_epochs": 2, **cold_start},
    )
    project.write(PROMPTS)
    project.write(SFT_ROWS, name="sft.jsonl")
    return project


def test_a_cold_start_comes_first_and_leaves_its_student(tmp_path, tiny_models):
    project = cold_project(tmp_path, tiny_models, learning_rate=5e-3, batch_size=1)
    phases = []
    project.reporter.progress = lambda done, total, unit, phase, eta_s: phases.append(
        (phase, done, total)
    )

    result = project.train()

    reported = project.reporter.measured
    assert (result.steps, len(reported)) == (13, 13)
    losses = [metrics["cold_start_loss"] for metrics in reported[:10]]
    assert sum(losses[5:]) < sum(losses[:5])
    assert "teacher_kl" not in reported[9]
    assert all(
        "teacher_kl" in metrics and "cold_start_loss" not in metrics for metrics in reported[10:]
    )
    # Each phase has a schedule of its own.
    assert reported[0]["learning_rate"] == pytest.approx(5e-3)
    assert reported[10]["learning_rate"] == pytest.approx(1e-3)
    assert phases == [
        *(("cold_start", i, 10) for i in range(1, 11)),
        *(("distill", i, 3) for i in (1, 2, 3)),
    ]
    assert project.checkpoints() == ["final", "step_000010"]


def test_a_plan_knows_the_steps_of_a_cold_start(tmp_path, tiny_models):
    project = cold_project(tmp_path, tiny_models)
    project.write([*SFT_ROWS, {"messages": [user("?"), answer("long " * 900)]}], name="sft.jsonl")
    project.write_config()

    reported = plan_training(project.workspace, PlanTraining())

    result = project.train()
    assert (reported.steps, reported.skipped) == (result.steps, result.skipped)


@pytest.mark.parametrize("step", [4, 8])
def test_a_run_goes_on_bit_for_bit_from_either_phase(tmp_path, tiny_models, step):
    project = cold_project(tmp_path, tiny_models, batch_size=2)
    project.config["trainer"]["save_step"] = 1

    whole, _ = assert_resumes_exactly(project, step)

    assert whole.steps == 9

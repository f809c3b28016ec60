from typing import get_args

import pytest

from fakes.killed_runs import assert_same_weights, measured
from fakes.reporters import KeptReporter
from fakes.training import PRICE_TOOL, make_project
from stillroom.data.formats import Task
from stillroom.errors import RunCancelledError
from stillroom.train.config.losses import LossName
from stillroom.train.on_policy.rollout_metrics import repetition
from stillroom.train.on_policy.student_policy import Limits, StudentRollout
from stillroom.train.on_policy.student_rollouts import SampledRollout, training_sequences_of


def distill(tmp_path, student, teacher, *, prompts=8, **sections):
    project = make_project(tmp_path, "distill", student, teacher={"path": str(teacher)}, **sections)
    rows = [{"prompt": f"Item {i}?", "metadata": {"expected_answer": "12"}} for i in range(prompts)]
    project.write(rows)
    return project


@pytest.mark.parametrize(
    ("loss_fn", "rank"),
    # With an adapter one loss is enough: it changes what is trained, and no loss knows of it.
    [*((loss, 0) for loss in sorted({*get_args(LossName)} - {"byte_reverse_kl"})), ("ppo", 4)],
)
def test_training_comes_nearer_to_the_teacher(tmp_path, tiny_models, loss_fn, rank):
    project = distill(
        tmp_path,
        tiny_models.folder("llama", "chatml"),
        tiny_models.folder("llama", "chatml", seed=1),
        data={"batch_size": 8, "group_size": 4},
        model={"qlora_rank": rank},
        algorithm={"loss_fn": loss_fn},
        rollout={"max_tokens": 12},
        trainer={"num_epochs": 10, "learning_rate": 2e-2, "schedule": "constant"},
    )

    result = project.train()

    measured = project.reporter.measured
    assert (result.steps, result.rows, result.method) == (10, 8, "distill")
    last = [metrics["teacher_kl"] for metrics in measured[-3:]]
    assert sum(last) / 3 < 0.8 * measured[0]["teacher_kl"]
    # What the trainer computes for sampled tokens is what the sampler computed.
    assert all(metrics["logprob_gap"] < 1e-5 for metrics in measured)
    assert all(metrics["failed"] == 0 for metrics in measured)
    assert project.checkpoints() == ["final"]


def test_the_tokens_of_tools_are_read_and_not_trained(tmp_path, tiny_models):
    project = distill(
        tmp_path,
        tiny_models.folder("llama", "clerk"),
        tiny_models.folder("llama", "clerk", seed=1),
        rollout={"max_turns": 4, "max_tokens": 8},
    )
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    project.train()

    for metrics in project.reporter.measured:
        assert metrics["turns"] > 1
        # A clerk's turn is one phrase and its end, so two tokens are trained for each turn.
        assert metrics["response_tokens"] == pytest.approx(2 * metrics["turns"])
        assert metrics["logprob_gap"] < 1e-5
        assert metrics["tool_errors"] == 0


def test_a_rollout_with_a_nudge_takes_every_turn_it_has(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    rollout = {"max_turns": 4, "max_tokens": 8, "termination_policy": "max_turns", "nudge": "And?"}
    project = distill(tmp_path, clerk, clerk, rollout=rollout)
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    project.train()

    for metrics in project.reporter.measured:
        assert metrics["turns"] == 4
        # Two tokens of each turn, and none of what the user says.
        assert metrics["response_tokens"] == pytest.approx(8)
        assert metrics["logprob_gap"] < 1e-5


def test_a_reply_that_fills_the_context_ends_the_rollout_and_costs_no_memory(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = distill(tmp_path, clerk, clerk, rollout={"max_turns": 4})
    (tmp_path / "tools.py").write_text(PRICE_TOOL.replace('"12"', '"12 " * 1000'), encoding="utf-8")

    project.train()

    for metrics in project.reporter.measured:
        # The first call's reply is the end of it: one turn was sampled, and the next cut off.
        assert 0 < metrics["truncated"] < 1
        assert metrics["response_tokens"] == pytest.approx(2.0)


def test_iterations_end_at_max_steps_and_only_their_prompts_count(tmp_path, tiny_models):
    folder = tiny_models.folder("llama", "chatml")
    project = distill(
        tmp_path,
        folder,
        folder,
        data={"batch_size": 2, "group_size": 3},
        rollout={"max_tokens": 4},
        trainer={"max_steps": 2, "num_epochs": 5},
    )

    result = project.train()

    assert (result.steps, result.rows) == (2, 4)
    assert len(project.reporter.measured) == 2


def test_substeps_split_the_rollouts_and_share_the_schedule(tmp_path, tiny_models):
    project = distill(
        tmp_path,
        tiny_models.folder("llama", "chatml"),
        tiny_models.folder("llama", "chatml", seed=1),
        data={"batch_size": 4, "group_size": 1},
        algorithm={"substeps": 4},
        rollout={"max_tokens": 6},
        trainer={"learning_rate": 1.0e-3},
    )

    project.train()

    rates = [metrics["learning_rate"] for metrics in project.reporter.measured]
    # Eight optimiser steps in two iterations, each reported at its last: steps 3 and 7.
    assert rates == pytest.approx([1e-3 * (1 - 0.9 * 3 / 8), 1e-3 * (1 - 0.9 * 7 / 8)])
    # Later substeps have moved away from the sampler, and say nothing of its exactness.
    assert all(metrics["logprob_gap"] < 1e-5 for metrics in project.reporter.measured)


def test_a_student_with_padding_in_its_vocabulary_is_trained(tmp_path, tiny_models):
    project = distill(
        tmp_path,
        tiny_models.folder("llama", "chatml", vocab_size=416),
        tiny_models.folder("llama", "chatml", seed=1),
        rollout={"max_tokens": 24},
    )

    project.train()

    assert all(metrics["logprob_gap"] < 1e-5 for metrics in project.reporter.measured)


def test_the_same_configuration_gives_the_same_run(tmp_path, tiny_models):
    project = distill(
        tmp_path,
        tiny_models.folder("gemma3", "chatml"),
        tiny_models.folder("llama", "chatml", seed=1),
        rollout={"max_tokens": 8},
    )

    project.train("run-1")
    project.train("run-2")

    # Clocks differ, and the process's peak memory may have grown since the first run.
    of_the_machine = {"sample_s", "update_s", "tokens_per_s", "memory_gb"}
    computed = [
        {name: value for name, value in metrics.items() if name not in of_the_machine}
        for metrics in project.reporter.measured
    ]
    assert computed[:2] == computed[2:]


def test_a_deterministic_run_is_the_same_at_any_concurrency(tmp_path, tiny_models):
    # Large enough that several rows at once are multiplied in another order than one.
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    project = distill(
        tmp_path,
        tiny_models.folder("llama", "clerk", **sizes),
        tiny_models.folder("llama", "clerk", seed=1, **sizes),
        prompts=4,
        data={"batch_size": 2, "group_size": 2},
        algorithm={"loss_fn": "importance_sampling"},
        rollout={"max_tokens": 4, "deterministic": True},
    )

    project.train("whole")
    unbroken = measured(project)
    project.reporter = KeptReporter()
    project.train("again", "rollout.concurrency=1")

    assert measured(project) == unbroken
    assert_same_weights(project, "again", "whole")


def test_dropout_of_the_model_does_not_part_trainer_and_sampler(tmp_path, tiny_models):
    folder = tiny_models.folder("llama", "chatml", attention_dropout=0.5)
    project = distill(tmp_path, folder, folder, rollout={"max_tokens": 8})

    project.train()

    assert project.reporter.measured[0]["logprob_gap"] < 1e-5


def test_a_cancelled_run_leaves_a_checkpoint_of_its_iteration(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = distill(tmp_path, clerk, clerk, data={"batch_size": 2}, rollout={"max_turns": 2})
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    project.reporter = KeptReporter(lambda: len(project.reporter.measured) >= 2)

    with pytest.raises(RunCancelledError):
        project.train()

    assert project.checkpoints() == ["step_000002"]


def test_a_run_cancelled_while_it_samples_does_not_finish_the_iteration(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = distill(tmp_path, clerk, clerk, data={"batch_size": 2}, rollout={"max_turns": 2})
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    project.reporter = KeptReporter(lambda: True)

    with pytest.raises(RunCancelledError):
        project.train()

    assert project.reporter.measured == []
    assert project.checkpoints() == []


def test_an_iteration_whose_rollouts_all_fail_is_an_error_and_not_a_perfect_student(
    tmp_path, tiny_models
):
    clerk = tiny_models.folder("llama", "clerk")
    project = distill(tmp_path, clerk, clerk)
    (tmp_path / "rewards.py").write_text(
        "from stillroom.tools import reward\n\n"
        "@reward\n"
        "def broken(args, messages) -> float:\n"
        "    raise ValueError('nothing fits')\n",
        encoding="utf-8",
    )

    with pytest.raises(Exception, match="every rollout of iteration 1 failed") as caught:
        project.train()
    assert "nothing fits" in caught.value.problem
    assert "rewards.py" in caught.value.fix


def test_a_rollout_that_takes_too_long_is_not_trained_on(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = distill(tmp_path, clerk, clerk, rollout={"rollout_timeout": 1e-6})

    with pytest.raises(Exception, match="every rollout of iteration 1 failed") as caught:
        project.train()
    assert "rollout_timeout" in caught.value.problem


def test_prompts_that_fill_the_context_are_an_error(tmp_path, tiny_models):
    folder = tiny_models.folder("llama", "chatml")
    project = distill(tmp_path, folder, folder, rollout={"max_context_window": 16})

    with pytest.raises(Exception, match="the prompts fill the context") as caught:
        project.train()
    assert "max_context_window" in caught.value.fix


def test_a_teacher_with_other_tokens_is_refused_before_anything_is_sampled(tmp_path, tiny_models):
    project = distill(
        tmp_path, tiny_models.folder("llama", "chatml"), tiny_models.folder("llama", "clerk")
    )

    with pytest.raises(Exception, match="different tokenizers"):
        project.train()
    assert project.reporter.measured == []


def test_what_was_sampled_is_what_is_trained():
    from stillroom.types import (
        SamplingSettings,
        StopReason,
        TeacherRecord,
        TokenTrace,
        Trajectory,
        Usage,
    )

    def rollout(tokens):
        settings = SamplingSettings()
        return Trajectory(
            id="t-0", task_id="t", sample=0, messages=[], tools=[], metadata={}, reward=None,
            rewards={}, success=None, stop_reason=StopReason.ANSWERED, turns=1, truncated=False,
            tool_errors=0, error=None, usage=Usage(), cost_usd=None, started_at="", duration_s=0.0,
            teacher=TeacherRecord(provider="student", model="m", settings=settings), tokens=tokens,
        )  # fmt: skip

    trace = TokenTrace(
        ids=[9, 8, 7, 6, 5],
        sampled=[False, True, True, False, True],
        logprobs=[0.0, -1.0, -2.0, 0.0, -3.0],
    )
    nothing = TokenTrace(ids=[9], sampled=[False], logprobs=[0.0])

    task = Task(
        task_id="t", messages=[], metadata={}, tool_names=None, reward_names=None, variables={}
    )
    sampled = StudentRollout(task, 0, 0, 0, Limits(1))

    (sequence,) = training_sequences_of(
        [SampledRollout(rollout(one), sampled) for one in (nothing, trace, None)]
    )

    assert sequence.tokens.ids == trace.ids
    assert sequence.tokens.trained == trace.sampled
    assert sequence.sampler_logprobs == [-1.0, -2.0, -3.0]


def test_rollouts_that_are_cut_off_raise_an_alarm(tmp_path, tiny_models):
    folder = tiny_models.folder("llama", "chatml")
    project = distill(
        tmp_path,
        folder,
        tiny_models.folder("llama", "chatml", seed=1),
        data={"batch_size": 2, "group_size": 2},
        rollout={"max_tokens": 4},
    )

    project.train()

    reported = project.reporter.alarmed
    assert reported[:2] == [[], []]
    assert all(alarms[0].startswith("truncation: ") for alarms in reported[2:])
    assert "rollout.max_tokens" in reported[-1][0]


def test_repetition_is_the_share_of_stretches_that_stood_in_the_same_turn_before():
    assert repetition([]) == 0
    assert repetition([[1, 2, 3]]) == 0
    assert repetition([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 0
    assert repetition([[1] * 7]) == 3 / 4
    assert repetition([[1, 2, 1, 2, 1, 2], [3, 4, 5, 6]]) == 1 / 4

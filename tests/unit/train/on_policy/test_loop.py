import pytest

from fakes.killed_runs import assert_same_weights, measured
from fakes.reporters import KeptReporter
from fakes.training import PRICE_TOOL, make_project
from stillroom.errors import RunCancelledError
from stillroom.train.on_policy.rollout_metrics import repetition


def distill(tmp_path, student, teacher, *, prompts=8, **sections):
    project = make_project(tmp_path, "distill", student, teacher={"path": str(teacher)}, **sections)
    rows = [{"prompt": f"Item {i}?", "metadata": {"expected_answer": "12"}} for i in range(prompts)]
    project.write(rows)
    return project


# The gradients of all losses are those of their formulas: test_policy_update.py.
@pytest.mark.parametrize(("loss_fn", "rank"), [("full_reverse_kl", 0), ("ppo", 4)])
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


def test_a_rollout_with_a_nudge_takes_every_turn_it_has(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    rollout = {"max_turns": 4, "max_tokens": 8, "termination_policy": "max_turns", "nudge": "And?"}
    project = distill(tmp_path, clerk, clerk, rollout=rollout)
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    project.train()

    for metrics in project.reporter.measured:
        assert metrics["turns"] == 4
        # Two tokens of each turn, and none of what the user and the tool say.
        assert metrics["response_tokens"] == pytest.approx(8)
        assert metrics["logprob_gap"] < 1e-5
        assert metrics["tool_errors"] == 0


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


@pytest.mark.parametrize("tools", ["", PRICE_TOOL], ids=["no tools", "tools"])
def test_a_deterministic_run_is_the_same_at_any_concurrency(tmp_path, tiny_models, tools):
    # Large enough that several rows at once are multiplied in another order than one, and varied
    # enough in its answers that this shows; it still calls its tools.
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "initializer_range": 0.2,
    }
    project = distill(
        tmp_path,
        tiny_models.folder("llama", "clerk", **sizes),
        tiny_models.folder("llama", "clerk", seed=1, **sizes),
        data={"batch_size": 4, "group_size": 2},
        algorithm={"loss_fn": "importance_sampling"},
        rollout={"max_turns": 3, "max_tokens": 4, "deterministic": True},
    )
    if tools:
        (tmp_path / "tools.py").write_text(tools, encoding="utf-8")
    metrics = {}

    for concurrency in ("1", "3", "8"):
        project.reporter = KeptReporter()
        project.train(concurrency, f"rollout.concurrency={concurrency}")
        metrics[concurrency] = measured(project)

    assert (metrics["1"][0]["turns"] > 1) == bool(tools)
    for concurrency in ("3", "8"):
        assert metrics[concurrency] == metrics["1"]
        assert_same_weights(project, concurrency, "1")


def test_dropout_and_padding_of_the_vocabulary_do_not_part_trainer_and_sampler(
    tmp_path, tiny_models
):
    student = tiny_models.folder("llama", "chatml", attention_dropout=0.5, vocab_size=416)
    teacher = tiny_models.folder("llama", "chatml", seed=1)
    project = distill(tmp_path, student, teacher, rollout={"max_tokens": 24})

    project.train()

    assert project.reporter.measured[0]["logprob_gap"] < 1e-5


@pytest.mark.parametrize(("iterations", "checkpoints"), [(2, ["step_000002"]), (0, [])])
def test_a_cancelled_run_leaves_a_checkpoint_of_its_last_whole_iteration(
    tmp_path, tiny_models, iterations, checkpoints
):
    clerk = tiny_models.folder("llama", "clerk")
    project = distill(tmp_path, clerk, clerk, data={"batch_size": 2}, rollout={"max_turns": 2})
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    project.reporter = KeptReporter(lambda: len(project.reporter.measured) >= iterations)

    with pytest.raises(RunCancelledError):
        project.train()

    assert len(project.reporter.measured) == iterations
    assert project.checkpoints() == checkpoints


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

"""On-policy distillation with rows of the teacher mixed into the student's rollouts."""

from collections import Counter

import pytest
import torch

from fakes.conversations import answer, user
from fakes.killed_runs import assert_resumes_exactly
from fakes.training import gradients, make_project, make_student
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import SftRow
from stillroom.errors import ConfigError
from stillroom.lineage import read_manifest
from stillroom.models.batches import TokenSequence
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.schema import DistillConfig
from stillroom.train.methods.sft import encode_sft
from stillroom.train.on_policy.loop import rows_of_iteration
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(5)]


@pytest.fixture
def student(tiny_models):
    return tiny_models.folder("llama", "chatml")


def distill(root, student, scoring, rollout, **sections):
    project = make_project(
        root,
        "distill",
        student,
        **{
            "teacher": {"path": str(scoring)},
            "rollout": {"max_tokens": 8, "rows_file": "rows.jsonl", **rollout},
            **sections,
        },
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(8)])
    project.write(ROWS, name="rows.jsonl")
    return project


@pytest.mark.parametrize("own_prompt_reading", [None, "You know every price."])
def test_a_run_learns_from_rollouts_and_rows_and_resumes_bit_for_bit(
    tmp_path, student, tiny_models, own_prompt_reading
):
    teacher = tiny_models.folder("llama", "chatml", seed=1)
    project = distill(tmp_path, student, teacher, {"on_policy_share": 0.5})
    project.config["teacher"]["system"] = own_prompt_reading
    project.config["trainer"]["save_step"] = 1

    _, measured = assert_resumes_exactly(project, 2)

    assert all(metrics["row_loss"] > 0 for metrics in measured)
    paths = [record.path for record in read_manifest(project.checkpoint("final", "whole")).inputs]
    assert str(tmp_path / "rows.jsonl") in paths


def test_the_gradient_of_rows_is_that_of_rollouts_with_the_same_tokens(tiny_models, student):
    one = make_student(tiny_models, student)
    teacher = LocalTeacher(tiny_models.load("llama", "chatml", seed=1))
    rows = [SftRow(messages=row["messages"], tools=[], metadata={}) for row in ROWS]
    encoded = encode_sft(rows, ChatRenderer(one.loaded.tokenizer), max_length=500).sequences

    def gradient(num_rows):
        sequences = [
            TrainingSequence(tokens, [-1.0] * tokens.num_trained, is_row=place < num_rows)
            for place, tokens in enumerate(encoded)
        ]
        stats = UpdateStats()
        accumulate_gradient(one, {0: teacher}, sequences, AlgorithmSection(), stats)
        return gradients(one), stats

    (as_rollouts, sampled), (mixed, stats) = gradient(0), gradient(3)

    for name, reference in as_rollouts.items():
        torch.testing.assert_close(mixed[name], reference, rtol=1e-4, atol=1e-6)
    num = [tokens.num_trained for tokens in encoded]
    assert (stats.num_row_tokens, stats.num_tokens) == (sum(num[:3]), sum(num[3:]))
    assert stats.row_loss + stats.loss == pytest.approx(sampled.loss, rel=1e-5)


def test_each_epoch_of_rows_has_every_row_once():
    config = DistillConfig.model_validate(
        {
            "dataset_type": "distill",
            "data": {"batch_size": 4},
            "model": {"path": "s"},
            "teacher": {"path": "t"},
            "rollout": {"on_policy_share": 0.5, "rows_file": "rows.jsonl"},
            "trainer": {"num_epochs": 1},
        }
    )
    added = [TokenSequence([i, i], [False, True]) for i in range(5)]
    chosen = [[one.tokens.ids[0] for one in rows_of_iteration(added, config, i)] for i in range(5)]
    assert all(len(rows) == 4 for rows in chosen)
    together = [row for rows in chosen for row in rows]
    assert all(Counter(together[i : i + 5]) == Counter(range(5)) for i in range(0, 20, 5))
    assert together[:5] != together[5:10]
    assert rows_of_iteration([], config, 0) == []


@pytest.mark.parametrize(
    ("message", "sections"),
    [
        ("set it", {"rollout": {"on_policy_share": None}}),
        ("needs rollout.rows_file", {"rollout": {"rows_file": None}}),
        ("compares distributions", {"algorithm": {"loss_fn": "ppo"}}),
        ("compares distributions", {"algorithm": {"reward_coef": 1.0}, "data": {"group_size": 2}}),
        ("needs a teacher in this process", {"teacher": {"path": "t", "provider": "vllm"}}),
        ("cannot be a list", {"teacher": {"path": ["t"]}}),
        ("compares rows token by token", {"teacher": {"path": "t", "tokens": "reread"}}),
    ],
)
def test_what_rows_cannot_be_mixed_into_is_refused_with_a_reason(
    tmp_path, student, message, sections
):
    rollout = {"on_policy_share": 0.5, **sections.pop("rollout", {})}
    with pytest.raises(ConfigError, match=message):
        distill(tmp_path, student, "t", rollout, **sections).train()

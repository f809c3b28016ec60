"""A teacher whose tokenizer or chat template is not the student's."""

from dataclasses import replace

import pytest
import torch

from fakes.killed_runs import assert_resumes_exactly, weights
from fakes.training import PRICE_TOOL, gradients, largest_gap, make_project, make_student
from stillroom.errors import EngineError, ModelError
from stillroom.models.batches import TokenSequence
from stillroom.models.load import load_model
from stillroom.models.reread.pair_check import open_pair
from stillroom.models.resolve import locate_model
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.request import PlanTraining
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.planning.plan import plan_training
from stillroom.types import TokenTrace


def project_of(tmp_path, student, teacher_folder, **sections):
    project = make_project(
        tmp_path,
        "distill",
        student,
        **{
            "data": {"batch_size": 4, "group_size": 1},
            "rollout": {"max_tokens": 10},
            **sections,
            "teacher": {
                "path": str(teacher_folder),
                "tokens": "reread",
                **sections.get("teacher", {}),
            },
        },
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(8)])
    return project


def test_a_student_comes_nearer_to_a_teacher_with_other_tokens(tmp_path, tiny_models):
    project = project_of(
        tmp_path,
        tiny_models.folder("llama", "clerk"),
        tiny_models.folder("llama", "llama3", seed=1),
        model={"qlora_rank": 4},
        data={"batch_size": 8, "group_size": 1},
        trainer={"num_epochs": 10, "learning_rate": 2e-2, "schedule": "constant"},
    )

    project.train()

    measured = project.reporter.measured
    last = [metrics["teacher_kl"] for metrics in measured[-3:]]
    assert sum(last) / 3 < 0.8 * measured[0]["teacher_kl"]
    assert all(metrics["logprob_gap"] < 1e-5 for metrics in measured)
    assert measured[0]["byte_share"] > 0.95
    assert measured[0]["not_compared"] < 0.2
    assert any("with its own tokenizer" in note for note in project.reporter.notes)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, tiny_models):
    project = project_of(
        tmp_path,
        tiny_models.folder("llama", "clerk"),
        tiny_models.folder("llama", "llama3", seed=1),
        data={"batch_size": 2, "group_size": 2},
        rollout={
            "max_turns": 3,
            "max_tokens": 8,
            "max_staleness": 1,
            "stragglers": 0.5,
            "termination_policy": "max_turns",
        },
        algorithm={"substeps": 2, "mask_special_tokens": True},
        trainer={"num_epochs": 1, "save_step": 1},
    )

    assert_resumes_exactly(project, 3)


def test_with_equal_tokens_the_loss_is_that_over_the_whole_vocabulary(tmp_path, tiny_models):
    folders = tiny_models.folder("llama", "chatml"), tiny_models.folder("llama", "chatml", seed=1)
    for name, tokens in (("bytes", "reread"), ("whole", "same")):
        (tmp_path / name).mkdir()
        project = project_of(tmp_path / name, *folders, teacher={"tokens": tokens})
        project.train()
        if tokens == "reread":
            ours, notes = project, project.reporter.notes

    reference = project.reporter.measured
    kept = ("loss", "teacher_kl", "grad_norm", "entropy")
    for mine, other in zip(ours.reporter.measured, reference, strict=True):
        assert [mine[k] for k in kept] == [other[k] for k in kept]
    mine, other = weights(ours, "run-1"), weights(project, "run-1")
    assert all(torch.equal(mine[name], other[name]) for name in other)
    assert any("has the student's tokenizer and chat template" in note for note in notes)


def pair_and_models(tiny_models, student, teacher):
    made = make_student(tiny_models, student)
    loaded = load_model(tiny_models.workspace, locate_model(tiny_models.workspace, str(teacher)))
    pair = open_pair(made.loaded, loaded)
    assert pair is not None
    return made, LocalTeacher(loaded), pair


def sequence_of(student, pair, text):
    """Returns one answer of the student, as it is trained on."""
    question = [{"role": "user", "content": "Item?"}]
    prompt = pair.student.renderer.prompt_ids(question, [])
    turn = {"role": "assistant", "content": text}
    ids = pair.student.tokenizer.encode(
        pair.student.renderer.turn_text(turn, []), add_special_tokens=False
    )
    sampled = [False] * len(prompt) + [True] * len(ids)
    trace = TokenTrace(ids=prompt + ids, sampled=sampled, logprobs=[0.0] * len(sampled))
    reading = pair.read(trace, [*question, turn], [], num_turns=1)
    tokens = TokenSequence(trace.ids, sampled)
    return TrainingSequence(tokens, [-1.0] * len(ids), reading=reading)


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_the_gradient_formed_by_hand_is_autograds(tiny_models, monkeypatch, reward_coef):
    student, teacher, pair = pair_and_models(
        tiny_models,
        tiny_models.folder("llama", "clerk"),
        tiny_models.folder("llama", "llama3", seed=1),
    )
    sequences = [sequence_of(student, pair, text) for text in ("The answer is 12.", "Red chair?")]
    if reward_coef:
        sequences = [
            replace(one, advantages=[reward_coef * sign] * one.tokens.num_trained)
            for one, sign in zip(sequences, (1, -1), strict=True)
        ]
    algorithm = AlgorithmSection(loss_fn="byte_reverse_kl", reward_coef=reward_coef)

    def gradient():
        stats = UpdateStats()
        accumulate_gradient(student, {0: teacher}, sequences, algorithm, stats)
        return stats.loss, gradients(student)

    hand_gradients = gradient()
    monkeypatch.setattr(type(student), "hand_gradients", None)
    by_autograd = gradient()

    assert hand_gradients[0] == pytest.approx(by_autograd[0], rel=1e-5)
    assert largest_gap(hand_gradients[1], by_autograd[1]) < 1e-4


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"algorithm": {"loss_fn": "full_reverse_kl"}},
            "full_reverse_kl compares tokens: set algorithm.loss_fn: byte_reverse_kl",
        ),
        (
            {"teacher": {"tokens": "same"}, "algorithm": {"loss_fn": "byte_reverse_kl"}},
            "set teacher.tokens: reread",
        ),
        (
            {
                "curriculum": {"teacher_share": 0.5, "teacher_steps": 2},
                "rollout": {"max_turns": 2},
            },
            "leave teacher_share out",
        ),
        (
            {"dataset_type": "sft"},
            "soft_targets needs probabilities of the student's own tokens",
        ),
    ],
)
def test_what_cannot_be_compared_by_bytes_is_refused_by_its_key(
    tmp_path, tiny_models, sections, said
):
    folder = tiny_models.folder("llama", "clerk")
    kind = sections.get("dataset_type", "distill")
    given = {name: one for name, one in sections.items() if name != "dataset_type"}
    project = project_of(tmp_path, folder, folder, **given)
    project.config["dataset_type"] = kind

    with pytest.raises(EngineError, match=said):
        project.train()


def test_without_reread_the_refusal_names_the_lines_of_the_config(tmp_path, tiny_models):
    project = project_of(
        tmp_path,
        tiny_models.folder("llama", "clerk"),
        tiny_models.folder("llama", "llama3"),
        teacher={"tokens": "same"},
    )

    with pytest.raises(EngineError, match=r"tokens: reread\} and algorithm: \{loss_fn: byte"):
        project.train()


def test_a_teacher_that_always_thinks_is_refused_for_a_student_that_does_not(tmp_path, tiny_models):
    project = project_of(
        tmp_path,
        tiny_models.folder("llama", "chatml"),
        tiny_models.folder("llama", "always-thinks"),
    )

    with pytest.raises(EngineError, match="always thinks before an answer"):
        project.train()


def test_a_teacher_that_cannot_be_shown_tool_calls_is_refused_for_a_student_with_tools(
    tmp_path, tiny_models
):
    project = project_of(
        tmp_path, tiny_models.folder("llama", "clerk"), tiny_models.folder("llama", "gemma")
    )
    project.write_config()
    assert plan_training(project.workspace, PlanTraining()).fits
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    for refuse in (lambda: plan_training(project.workspace, PlanTraining()), project.train):
        with pytest.raises(ModelError, match="does not render tool calls verbatim") as caught:
            refuse()
        assert "move tools.py away" in caught.value.fix
    assert project.reporter.measured == []
    project.write([{"prompt": "Item?", "tools": []}])
    assert plan_training(project.workspace, PlanTraining()).fits


def test_each_files_teacher_reads_it_in_tokens_of_its_own(tmp_path, tiny_models):
    kinds = [("llama3", 1), ("chatml", 1), ("clerk", 0)]
    folders = [tiny_models.folder("llama", kind, seed=seed) for kind, seed in kinds]
    names = [f"{i}.jsonl" for i in range(3)]
    project = project_of(
        tmp_path,
        tiny_models.folder("llama", "clerk"),
        folders[0],
        teacher={"path": [str(folder) for folder in folders]},
        data={"train_file": names, "batch_size": 6, "group_size": 1},
        curriculum={"prefix_tokens": 5},
    )
    for name in names:
        project.write([{"prompt": f"{name} {i}?"} for i in range(2)], name=name)

    project.train()

    [metrics] = project.reporter.measured
    assert all(metrics[f"teacher_kl/dataset_{i}"] > 1 for i in range(2))
    # The third is the student itself, which is compared over the whole vocabulary.
    assert abs(metrics["teacher_kl/dataset_2"]) < 1e-6
    assert metrics["prefix_tokens"] == 5
    assert metrics["byte_share"] > 0.9
    reads = [note for note in project.reporter.notes if "with its own tokenizer" in note]
    whole = [note for note in project.reporter.notes if "has the student's tokenizer" in note]
    assert (len(reads), len(whole)) == (2, 1)


def test_a_teacher_reads_no_more_than_fits_its_context(tiny_models):
    student, _, pair = pair_and_models(
        tiny_models,
        tiny_models.folder("llama", "clerk"),
        tiny_models.folder("llama", "llama3", seed=1),
    )
    pair.max_context = 8

    sequence = sequence_of(student, pair, "The answer is 12.")

    assert len(sequence.reading.tokens.ids) <= 8
    assert sequence.reading.points == []
    assert sequence.reading.num_uncompared_tokens == sequence.tokens.num_trained

"""What plan_training says of student and teacher after loading both."""

import pytest
import torch

from fakes.conversations import answer, user
from fakes.training import make_project, make_student
from stillroom.data.chat.render import ChatRenderer
from stillroom.evaluate.intervals import smallest_difference
from stillroom.models.batches import TokenSequence
from stillroom.models.reread.pair_check import open_pair
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.request import PlanTraining
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.planning.model_checks import divergence_note, end_token_notes, prompt_note
from stillroom.train.planning.plan import plan_training

ANSWERS = ("It costs 7.", "The lamp is red.", "No.")


@pytest.fixture
def folder(tiny_models):
    return tiny_models.folder("qwen3", "chatml")


def rows_of(loaded):
    rendered = [
        ChatRenderer(loaded.tokenizer).conversation([user("Which?"), answer(text)], [])
        for text in ANSWERS
    ]
    return [TokenSequence(one.ids, one.trained) for one in rendered]


def sampled_by(loaded):
    return [TrainingSequence(row, [-1.0] * row.num_trained) for row in rows_of(loaded)]


def test_a_teacher_that_is_the_student_is_said_to_teach_little(tiny_models, folder):
    student = make_student(tiny_models, folder)
    note = divergence_note(student, LocalTeacher(student.loaded), sampled_by(student.loaded))
    assert "is 0 nats per token, and they share 100% of their 16 most likely tokens" in note
    assert "this teacher will teach little" in note


def test_an_unrelated_teacher_is_said_to_be_far_apart(tiny_models, folder):
    student = make_student(tiny_models, folder)
    other = tiny_models.load("qwen3", "chatml", seed=5)
    with torch.no_grad():
        other.model.get_output_embeddings().weight.normal_(std=3.0)
    note = divergence_note(student, LocalTeacher(other), sampled_by(student.loaded))
    assert "train the student on the teacher's answers first" in note


def test_a_teacher_that_would_not_end_the_answers_is_named(tiny_models, folder):
    student = make_student(tiny_models, folder)
    rows = rows_of(student.loaded)
    # Tiny models end a turn anywhere with one probability, below what a teacher needs.
    [note] = end_token_notes(student, rows, LocalTeacher(student.loaded))
    assert "the teacher gives <|im_end|> a probability of" in note
    assert "its soft targets would teach the student to continue there" in note

    sure = tiny_models.load("qwen3", "chatml")
    end = sure.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        sure.model.get_output_embeddings().weight[end, 0] += 64.0
    assert end_token_notes(student, rows, LocalTeacher(sure)) == []


def test_a_system_prompt_that_only_one_template_adds_is_shown(tiny_models, folder):
    student = tiny_models.load("qwen3", "chatml")
    teacher = tiny_models.load("qwen3", "chatml", seed=1)
    added = "<|im_start|>system\nYou are Clerk, a kind shop assistant.<|im_end|>\n"
    without_system = "{% if messages[0].role != 'system' %}" + added + "{% endif %}"
    teacher.tokenizer.chat_template = without_system + teacher.tokenizer.chat_template
    pair = open_pair(student, teacher)
    assert pair is not None

    note = prompt_note(pair, [user("What does the lamp cost?")])

    assert note is not None
    assert "of teacher" in note
    assert "adds 'You are Clerk, a kind shop assistant.'" in note
    own = {"role": "system", "content": "Be brief and exact."}
    assert prompt_note(pair, [own, user("What does the lamp cost?")]) is None


@pytest.mark.parametrize(("num", "points"), [(20, 28), (200, 9), (2000, 3)])
def test_more_prompts_show_smaller_differences(num, points):
    assert round(100 * smallest_difference(num)) == points


def test_a_plan_says_what_its_evaluation_can_show(tmp_path, folder):
    project = make_project(tmp_path, "sft", folder)
    project.config["evals"] = [{"name": "held", "step": 1, "n": 3}]
    project.write([{"messages": [user("Which?"), answer(text)]} for text in ANSWERS * 2])
    project.write([{"prompt": f"Item {i}?"} for i in range(5)], name="held.jsonl")
    (tmp_path / "rewards.py").write_text(
        "from stillroom.tools import reward\n\n\n"
        "@reward()\ndef right(args, messages: list) -> float:\n    return 1.0\n"
    )
    project.write_config()
    reported = plan_training(project.workspace, PlanTraining())
    [note] = [note for note in reported.notes if "can show a difference" in note]
    assert note.startswith("the 3 prompts of the evaluation 'held' can show a difference of about")
    assert note.endswith("; more prompts can show a smaller one")

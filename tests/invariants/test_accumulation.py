"""A batch in one forward pass has the gradient of the same batch in single ones."""

import pytest

from fakes.conversations import answer, user
from fakes.training import gradients, largest_gap, make_student, one_by_one
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import DpoRow, SftRow
from stillroom.train.config.sections import DpoSection
from stillroom.train.methods.dpo import accumulate_preference, add_reference, encode_pairs
from stillroom.train.methods.sft import accumulate_loss, encode_sft, validation_loss

QUESTIONS = ["a", "Which item is it?", "b" * 40, "How many?", "c", "d e f", "Why?", "x" * 25]


@pytest.fixture(params=[0, 4], ids=["full", "adapter"])
def student(request, tiny_models):
    folder = tiny_models.folder("gemma3", "chatml")
    return make_student(tiny_models, folder, rank=request.param)


def renderer(student):
    return ChatRenderer(student.loaded.tokenizer)


def test_eight_rows_at_once_are_eight_rows_one_by_one(student):
    rows = [
        SftRow(messages=[user(q), answer("It is " + q[::-1])], tools=[], metadata={})
        for q in QUESTIONS
    ]
    sequences = encode_sft(rows, renderer(student), max_length=500).sequences

    whole = accumulate_loss(student, sequences)
    together = gradients(student)
    single = accumulate_loss(one_by_one(student), sequences)

    assert single.loss == pytest.approx(whole.loss, abs=1e-5)
    assert single.num_tokens == whole.num_tokens
    assert largest_gap(gradients(student), together) < 1e-5
    assert validation_loss(one_by_one(student), sequences) == pytest.approx(whole.loss, abs=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_eight_pairs_at_once_are_eight_pairs_one_by_one(student, loss):
    rows = [
        DpoRow(prompt=[user(q)], chosen=[answer(q[::-1])], rejected=[answer(q * 2)], tools=[])
        for q in QUESTIONS
    ]
    pairs = encode_pairs(rows, renderer(student), max_length=500).pairs
    settings = DpoSection(loss=loss, nll_coef=0.2)
    is_mean = loss == "ipo"

    at_once = add_reference(student, pairs, is_mean=is_mean)
    apart = add_reference(one_by_one(student), pairs, is_mean=is_mean)
    assert [item.chosen for item in apart] == pytest.approx([i.chosen for i in at_once], abs=1e-3)

    whole = accumulate_preference(student, at_once, settings)
    together = gradients(student)
    single = accumulate_preference(one_by_one(student), at_once, settings)

    assert single.loss == pytest.approx(whole.loss, abs=1e-5)
    assert single.margin == pytest.approx(whole.margin, abs=1e-4)
    assert largest_gap(gradients(student), together) < 1e-5

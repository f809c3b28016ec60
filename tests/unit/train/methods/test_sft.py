import pytest
import torch

from fakes.conversations import PRICE, answer, calls, reply, user
from fakes.training import gradients, largest_gap, make_student
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import SftRow
from stillroom.train.methods.sft import accumulate_loss, encode_sft, validation_loss

ROWS = [
    SftRow(
        messages=[
            user("What does the lamp cost?"),
            calls(("price", "{}")),
            reply("12"),
            answer("12"),
        ],
        tools=[PRICE],
        metadata={},
    ),
    SftRow(messages=[user("a"), answer("The answer is 12.")], tools=[], metadata={}),
    SftRow(messages=[user("b" * 30), answer("c"), user("d"), answer("e")], tools=[], metadata={}),
]


@pytest.fixture(params=["qwen3", "gemma2", "mistral-sliding"])
def folder(request, tiny_models):
    return tiny_models.folder(request.param, "chatml")


def encoded(student):
    return encode_sft(ROWS, ChatRenderer(student.loaded.tokenizer), max_length=500).sequences


def labels_and_inputs(sequences):
    """The batch as transformers takes it: padded, what is not trained labelled -100."""
    longest = max(len(sequence.ids) for sequence in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        length = len(sequence.ids)
        ids[row, :length] = torch.tensor(sequence.ids)
        mask[row, :length] = 1
        trained = torch.tensor(sequence.trained)
        labels[row, :length][trained] = ids[row, :length][trained]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_loss_and_gradient_are_those_of_transformers_on_the_masked_labels(tiny_models, folder):
    student = make_student(tiny_models, folder)
    sequences = encoded(student)

    batch = accumulate_loss(student, sequences)
    ours = gradients(student)
    loss = student.loaded.model(**labels_and_inputs(sequences)).loss
    loss.backward()
    reference = gradients(student)

    assert batch.loss == pytest.approx(loss.item(), abs=1e-5)
    assert batch.num_tokens == sum(sequence.num_trained for sequence in sequences)
    assert largest_gap(ours, reference) < 1e-5


def test_of_an_adapter_only_its_own_weights_get_a_gradient(tiny_models, folder):
    student = make_student(tiny_models, folder, rank=4)

    batch = accumulate_loss(student, encoded(student))

    found = gradients(student)
    assert found
    assert all("lora_" in name for name in found)
    plain = make_student(tiny_models, folder)
    assert batch.loss == pytest.approx(accumulate_loss(plain, encoded(plain)).loss, abs=1e-5)


def test_the_validation_loss_is_the_mean_over_all_tokens_and_no_gradient(tiny_models, folder):
    student = make_student(tiny_models, folder)
    sequences = encoded(student)

    found = validation_loss(student, sequences)

    assert gradients(student) == {}
    assert found == pytest.approx(accumulate_loss(student, sequences).loss, abs=1e-5)
    assert student.module.training

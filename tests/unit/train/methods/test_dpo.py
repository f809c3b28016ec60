import pytest
import torch

from fakes.conversations import answer, user
from fakes.families import ORIGINAL_CONTEXT, save_family
from fakes.training import gradients, largest_gap, make_student
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import DpoRow
from stillroom.models.batches import TokenSequence
from stillroom.train.config.sections import DpoSection
from stillroom.train.methods.dpo import (
    TokenPair,
    accumulate_preference,
    add_reference,
    encode_pairs,
    validate_preference,
)

ROWS = [
    DpoRow(
        prompt=[user("What does the lamp cost?")],
        chosen=[answer("It costs 12.")],
        rejected=[answer("I do not know that, sorry.")],
        tools=[],
    ),
    DpoRow(
        prompt=[user("a"), answer("b"), user("c")],
        chosen=[answer("d")],
        rejected=[answer("e"), user("f"), answer("g")],
        tools=[],
    ),
]
LOSSES = {
    "sigmoid": DpoSection(beta=0.3),
    "smoothed": DpoSection(beta=0.3, label_smoothing=0.2),
    "ipo": DpoSection(beta=0.3, loss="ipo"),
    "with nll": DpoSection(beta=0.3, nll_coef=0.5),
    "ipo with nll": DpoSection(beta=0.3, loss="ipo", nll_coef=0.5),
}


@pytest.fixture
def folder(tiny_models):
    return tiny_models.folder("llama", "chatml")


def encoded(student):
    return encode_pairs(ROWS, ChatRenderer(student.loaded.tokenizer), max_length=500).pairs


def moved(student):
    """Moves the weights a little away from where training starts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.trainable():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return student


def reference_loss(model, reference, pairs, settings):
    """The loss by the papers' formulas, sequence by sequence."""

    def logprob(of, sequence):
        ids = torch.tensor([sequence.ids])
        logprobs = of(ids).logits[0].log_softmax(-1)
        chosen = [
            logprobs[i - 1, ids[0, i]] for i in range(1, len(sequence.ids)) if sequence.trained[i]
        ]
        total = torch.stack(chosen).sum()
        return total / len(chosen) if settings.loss == "ipo" else total

    losses = []
    for pair in pairs:
        policy = logprob(model, pair.chosen) - logprob(model, pair.rejected)
        base = logprob(reference, pair.chosen) - logprob(reference, pair.rejected)
        margin = settings.beta * (policy - base)
        if settings.loss == "ipo":
            loss = (policy - base - 1 / (2 * settings.beta)) ** 2
        else:
            smoothing = settings.label_smoothing
            loss = (1 - smoothing) * torch.log1p(torch.exp(-margin)) + smoothing * torch.log1p(
                torch.exp(margin)
            )
        tokens = 1 if settings.loss == "ipo" else pair.chosen.num_trained
        losses.append(loss - settings.nll_coef * logprob(model, pair.chosen) / tokens)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradient_are_those_of_the_formulas_in_float64(tiny_models, folder, kind):
    settings = LOSSES[kind]
    student = make_student(tiny_models, folder)
    reference = make_student(tiny_models, folder).loaded.model.double()
    pairs = encoded(student)
    referenced = add_reference(student, pairs, is_mean=settings.loss == "ipo")
    moved(student)

    stats = accumulate_preference(student, referenced, settings)
    ours = gradients(student)
    exact = student.loaded.model.double()
    loss = reference_loss(exact, reference, pairs, settings)
    loss.backward()

    assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
    assert largest_gap(ours, gradients(student)) < 1e-5


def test_margin_and_accuracy_say_how_many_pairs_stand_the_right_way_round(tiny_models, folder):
    student = make_student(tiny_models, folder)
    first, second = add_reference(student, encoded(student), is_mean=False)
    # A reference that found the first chosen answer less likely, and the second more.
    low = type(first)(first.pair, first.chosen - 2.0, first.rejected)
    high = type(second)(second.pair, second.chosen + 1.0, second.rejected)

    stats = accumulate_preference(student, [low, high], DpoSection(beta=0.5))

    assert stats.margin == pytest.approx((1.0 - 0.5) / 2, abs=1e-5)
    assert stats.accuracy == 0.5


@pytest.mark.parametrize("kind", ["sigmoid", "ipo with nll"])
def test_held_out_pairs_are_measured_as_trained_ones_without_a_gradient(tiny_models, folder, kind):
    student = make_student(tiny_models, folder)
    referenced = add_reference(student, encoded(student), is_mean=LOSSES[kind].loss == "ipo")
    moved(student)

    found = validate_preference(student, referenced, LOSSES[kind])

    assert gradients(student) == {}
    assert found.loss == pytest.approx(
        accumulate_preference(student, referenced, LOSSES[kind]).loss, abs=1e-5
    )


def test_a_pair_on_both_sides_of_the_original_context_is_scored_as_its_answers_are_alone(
    tiny_models,
):
    student = make_student(tiny_models, save_family(tiny_models.root, "phi4-mini"))
    ids = [3 + 7 * i % 340 for i in range(ORIGINAL_CONTEXT + 12)]
    longer = TokenSequence(ids, [i > 4 for i in range(len(ids))])
    pair = TokenPair(TokenSequence(ids[:16], longer.trained[:16]), longer)

    [found] = add_reference(student, [pair], is_mean=False)

    with torch.no_grad():
        alone = [
            student.logprobs(student.collate([one])).sum().item()
            for one in (pair.chosen, pair.rejected)
        ]
    assert [found.chosen, found.rejected] == pytest.approx(alone, abs=1e-4)

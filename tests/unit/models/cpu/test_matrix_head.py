"""Values and gradients of the head as a matrix are autograd's, however it is cut into tiles."""

import pytest
import torch
from torch import nn

from stillroom.models.cpu.matrix_head import MatrixHead, matrix_head
from stillroom.models.lm_head import token_logprobs

NUM, HIDDEN, VOCABULARY = 13, 6, 40
KINDS = {"plain": (1.0, None), "scaled": (0.25, None), "capped": (1.0, 3.0), "both": (2.0, 1.5)}


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs():
    weight = nn.Parameter(2 * draw(VOCABULARY, HIDDEN, seed=1))
    targets = torch.arange(NUM) * 7 % VOCABULARY
    return weight, draw(NUM, HIDDEN, seed=2).requires_grad_(), targets


def exact(weight, hidden, targets, scale, softcap):
    logits = (hidden.double() @ weight.double().T) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return token_logprobs(logits, targets)


@pytest.fixture(params=[1, 5, 1000])
def tiles(request, monkeypatch):
    numbers = request.param * VOCABULARY
    monkeypatch.setattr("stillroom.models.cpu.matrix_head.TILE_LOGITS", numbers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("tiles")
def test_the_likelihoods_gradient_is_autograds(kind):
    weight, hidden, targets = inputs()
    expected = exact(weight, hidden, targets, *KINDS[kind])
    weight_gradient, hidden_gradient = torch.autograd.grad(-0.3 * expected.sum(), (weight, hidden))
    head = MatrixHead(weight, scale=KINDS[kind][0], softcap=KINDS[kind][1])

    for times in (1, 2):
        logprobs, gradient = head.add_nll_gradient(hidden.detach(), targets, scale=0.3)

        assert torch.allclose(logprobs.double(), expected, atol=1e-5)
        assert torch.allclose(gradient, hidden_gradient, atol=1e-5)
        assert torch.allclose(weight.grad, times * weight_gradient, atol=1e-5)


@pytest.mark.usefixtures("tiles")
def test_the_gradient_of_scores_survives_another_use_of_the_head():
    weight, hidden, targets = inputs()
    weights = draw(NUM, seed=3)
    expected = exact(weight, hidden, targets, 1.0, None)
    weight_gradient, _ = torch.autograd.grad((weights * expected).sum(), (weight, hidden))
    head = MatrixHead(weight, scale=1.0, softcap=None)

    scores = head.score(hidden.detach(), targets)
    # It forms its own logits where those of the scores were.
    head.logprobs(hidden.detach() + 1, targets)
    head.score_gradient(scores, weights)

    assert torch.allclose(weight.grad, weight_gradient, atol=1e-5)


def test_weights_in_bf16_are_scored_from_logits_in_float32():
    weight, hidden, targets = inputs()
    short = nn.Parameter(weight.detach().bfloat16())
    head = MatrixHead(short, scale=1.0, softcap=None)

    logprobs, gradient = head.add_nll_gradient(hidden.detach().bfloat16(), targets, scale=1.0)

    assert logprobs.dtype == torch.float32
    assert gradient.dtype == short.grad.dtype == torch.bfloat16
    assert torch.allclose(logprobs, exact(weight, hidden, targets, 1.0, None).float(), atol=0.2)


def test_a_head_of_another_kind_is_left_to_autograd():
    class Odd(nn.Linear):
        pass

    biased = nn.Linear(4, 9)
    for head in (biased, Odd(4, 9, bias=False), nn.Identity()):
        assert matrix_head(head, scale=1.0, softcap=None) is None

"""The gradients of whole models, formed by hand, are autograd's."""

import weakref

import pytest
import torch

from fakes.tiny_models import ARCHITECTURES, build_model, build_tokenizer
from stillroom.models.batches import TokenSequence, collate
from stillroom.models.lm_head import HeadRunner


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_models_gradient_is_autograds(architecture):
    model = build_model(architecture, build_tokenizer("chatml"))
    head = HeadRunner(model)
    # 0 is the padding token, which a text may hold too.
    rows = [[*range(5, 25), 0, 7, 7], [*range(40, 52), 0]]
    sequences = [TokenSequence(row, [i % 3 == 2 for i in range(len(row))]) for row in rows]
    batch = collate(sequences, device=torch.device("cpu"))

    def found():
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return gradients

    loss = -head.batch_logprobs(batch).sum()
    loss.backward()
    expected = found()
    ours = head.hand_gradients.add_nll_gradient(batch, scale=1.0)
    at_once = found()
    (-head.hand_gradients.logprobs(batch).sum()).backward()
    later = found()

    assert ours == pytest.approx(loss.item(), rel=1e-5)
    for gradients in (at_once, later):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            largest = expected[name].abs().max()
            assert torch.allclose(gradient, expected[name], rtol=1e-3, atol=1e-5 * largest)


def test_a_head_is_not_held_by_what_it_gives_out():
    """A circle would hold a model's memory after its last use."""
    head = HeadRunner(build_model("llama", build_tokenizer("chatml")))
    gone = weakref.ref(head)
    assert head.hand_gradients is not None

    del head

    assert gone() is None

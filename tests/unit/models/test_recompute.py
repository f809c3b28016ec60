import pytest
import torch
from torch import nn

from fakes.tiny_models import ARCHITECTURES, build_model, build_tokenizer
from stillroom.errors import ModelError
from stillroom.models.batches import TokenSequence
from stillroom.models.heads import OutputHead
from stillroom.models.probe import choose_passes
from stillroom.models.recompute import recompute_layers

TOKENIZER = build_tokenizer("chatml")


class Held:
    """Counts the numbers that a forward pass keeps for its backward pass."""

    def __init__(self):
        self.numbers = 0

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure):
        self._hooks.__exit__(*failure)

    def _keep(self, tensor):
        self.numbers += tensor.numel()
        return tensor


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_training", [True, False])
def test_gradients_stay_and_less_is_kept(architecture, is_training):
    model = build_model(architecture, TOKENIZER).train(is_training)
    head = OutputHead(model)
    choose_passes(head)
    rows = [list(range(5, 45)), list(range(40, 52))]
    sequences = [TokenSequence(row, [True] * len(row)) for row in rows]
    batch = head.collate(sequences)

    def gradients():
        with Held() as held:
            hidden = head.batch_hidden(batch)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        (hidden * weights).sum().backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return held.numbers, found

    numbers, expected = gradients()
    recompute_layers(model)
    fewer, found = gradients()

    assert fewer < 0.3 * numbers
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ModelError, match="Linear has no layers"):
        recompute_layers(nn.Linear(2, 2))

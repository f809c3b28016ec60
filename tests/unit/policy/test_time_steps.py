import pytest
import torch

from fakes.families import build_family
from stillroom.policy.time_steps import hold_time_steps


@torch.no_grad()
def in_two_ways(model, ids):
    """Returns the logits of one pass, and those of passes of a token each after the first eight."""
    whole = model(input_ids=ids, use_cache=False).logits
    output = model(input_ids=ids[:, :8], use_cache=True)
    parts, cache = [output.logits], output.past_key_values
    for at in range(8, ids.shape[1]):
        output = model(
            input_ids=ids[:, at : at + 1],
            past_key_values=cache,
            position_ids=torch.tensor([[at]]),
            use_cache=True,
        )
        parts.append(output.logits)
    return whole, torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", ["nemotron-h", "zamba2"])
def test_token_by_token_a_mamba_layer_keeps_to_its_least_time_step(family):
    ids = torch.randint(0, 350, (1, 40), generator=torch.Generator().manual_seed(0))
    model = build_family(family)
    plain, plain_steps = in_two_ways(model, ids)
    assert (plain - plain_steps).abs().max() > 1e-3

    hold_time_steps(model)
    hold_time_steps(model)

    whole, steps = in_two_ways(model, ids)
    assert torch.allclose(whole, plain, atol=5e-4)
    assert torch.allclose(steps, plain, atol=5e-4)

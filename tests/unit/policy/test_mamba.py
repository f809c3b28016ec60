"""Mamba layers while they are sampled: our formulas beside transformers', and time steps."""

import pytest
import torch
from transformers.models.bamba import modeling_bamba

from fakes.families import build_family
from stillroom.policy.mamba import fast_formulas, prepare_mamba

ROWS, HEADS, WIDTH, KEYS = 3, 8, 4, 5
NO_LIMIT = (0.0, float("inf"))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def scan(tokens: int, *, groups: int, state: torch.Tensor | None, limits=NO_LIMIT, scale=1.0):
    """Runs several tokens in a family's function, as its layer calls it."""
    torch.manual_seed(0)
    return modeling_bamba.mamba2_chunk_scan(
        draw(ROWS, tokens, HEADS, WIDTH),
        draw(ROWS, tokens, HEADS),
        -scale * torch.rand(HEADS),
        draw(ROWS, tokens, groups, KEYS),
        draw(ROWS, tokens, groups, KEYS),
        chunk_size=16,
        D=draw(HEADS),
        z=None,
        return_final_states=True,
        dt_bias=draw(HEADS),
        dt_softplus=True,
        initial_states=state,
        dt_limit=limits,
    )


def step(state: torch.Tensor, *, groups: int, scale=1.0) -> torch.Tensor:
    """Runs one token in a family's function, as its layer calls it."""
    torch.manual_seed(1)
    per_head = draw(ROWS, HEADS, 1).expand(-1, -1, WIDTH)
    decay, skip, bias = -scale * torch.rand(HEADS), draw(HEADS), draw(HEADS)
    return modeling_bamba.mamba2_selective_state_update(
        state,
        draw(ROWS, HEADS, WIDTH),
        per_head,
        decay[:, None, None].expand(-1, WIDTH, KEYS),
        draw(ROWS, groups, KEYS),
        draw(ROWS, groups, KEYS),
        skip[:, None].expand(-1, WIDTH),
        z=None,
        dt_bias=bias[:, None].expand(-1, WIDTH),
        dt_softplus=True,
    )


@pytest.fixture(autouse=True)
def _prepared() -> None:
    prepare_mamba(build_family("bamba"))


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert (ours - expected).abs().max() <= 5e-6 * expected.abs().max()


@pytest.mark.parametrize("tokens", [2, 65, 130])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scale", [0.01, 500.0])
def test_given_tokens_run_as_by_transformers_formula(tokens, groups, scale):
    for state in (None, draw(ROWS, HEADS, WIDTH, KEYS)):
        expected = scan(tokens, groups=groups, state=state, scale=scale)
        with fast_formulas():
            ours = scan(tokens, groups=groups, state=state, scale=scale)
        for mine, other in zip(ours, expected, strict=True):
            assert_close(mine, other)


def test_given_tokens_keep_to_the_limits_of_time_steps():
    expected = scan(20, groups=1, state=None, limits=(0.5, 0.6))
    with fast_formulas():
        assert_close(scan(20, groups=1, state=None, limits=(0.5, 0.6))[0], expected[0])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("scale", [0.01, 500.0])
def test_a_single_token_runs_as_by_transformers_formula(groups, scale):
    state = draw(ROWS, HEADS, WIDTH, KEYS)
    own_state = state.clone()
    expected = step(state, groups=groups, scale=scale)
    with fast_formulas():
        ours = step(own_state, groups=groups, scale=scale)
    assert_close(ours, expected)
    assert_close(own_state, state)


def test_passes_for_training_keep_transformers_formula():
    original = modeling_bamba.mamba2_chunk_scan.__wrapped__
    prepare_mamba(build_family("bamba"))
    assert modeling_bamba.mamba2_chunk_scan.__wrapped__ is original
    before = scan(20, groups=1, state=None)[0]
    with fast_formulas():
        assert not scan(20, groups=1, state=None)[0].equal(before)
    assert scan(20, groups=1, state=None)[0].equal(before)


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

    prepare_mamba(model)
    prepare_mamba(model)

    whole, steps = in_two_ways(model, ids)
    assert torch.allclose(whole, plain, atol=5e-4)
    assert torch.allclose(steps, plain, atol=5e-4)

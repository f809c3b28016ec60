import math
from collections import Counter

import pytest
import torch

from stillroom.errors import ModelError
from stillroom.policy.sampling import sample_tokens
from stillroom.types import SamplingSettings

LOGITS = torch.tensor([1.0, 3.0, -2.0, 0.5, 2.0])
SOFTMAX = LOGITS.softmax(-1).tolist()


def frequencies(settings, logits=LOGITS, num=4000):
    """Returns each token's share for draws that are spread evenly over [0, 1)."""
    draws = [(i + 0.5) / num for i in range(num)]
    ids, _ = sample_tokens(logits.expand(num, -1), [settings] * num, draws)
    counts = Counter(ids)
    return [counts[token] / num for token in range(logits.shape[0])]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probabilities_say(temperature):
    wanted = (LOGITS / temperature).softmax(-1).tolist()

    found = frequencies(SamplingSettings(temperature=temperature))

    assert found == pytest.approx(wanted, abs=2 / 4000)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {1}), (0.7, {1, 4}), (0.95, {0, 1, 4, 3})])
def test_top_p_keeps_the_fewest_tokens_with_that_mass_and_their_shares(top_p, kept):
    mass = sum(SOFTMAX[token] for token in kept)
    wanted = [SOFTMAX[token] / mass if token in kept else 0.0 for token in range(5)]

    found = frequencies(SamplingSettings(temperature=1.0, top_p=top_p))

    assert mass >= top_p
    assert found == pytest.approx(wanted, abs=2 / 4000)


def test_temperature_zero_takes_the_likeliest_token_whatever_is_drawn():
    settings = [SamplingSettings(temperature=0.0)] * 3

    ids, _ = sample_tokens(LOGITS.expand(3, -1), settings, [0.0, 0.5, 0.999999])

    assert ids == [1, 1, 1]


def test_log_probabilities_are_at_temperature_one_whatever_was_sampled_with():
    settings = [
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=2.0, top_p=0.9),
        SamplingSettings(temperature=1.0),
    ]

    ids, logprobs = sample_tokens(LOGITS.expand(3, -1), settings, [0.1, 0.4, 0.8])

    assert logprobs == pytest.approx([math.log(SOFTMAX[token]) for token in ids], abs=1e-6)


def test_rows_with_different_settings_do_not_change_each_other():
    tail = torch.tensor([[20.0, -1.0, -1.0]])
    plain, narrow = SamplingSettings(temperature=1.0), SamplingSettings(temperature=1.0, top_p=0.5)

    alone, _ = sample_tokens(tail, [plain], [0.0])
    beside, _ = sample_tokens(tail.expand(2, -1), [plain, narrow], [0.0, 0.0])

    # The draw 0.0 asks for the very last share, which belongs to the tail.
    assert alone == [2]
    assert beside == [2, 0]


def test_tokens_that_the_tokenizer_does_not_know_are_never_drawn():
    logits = torch.tensor([[0.0, 0.0, 9.0]]).expand(4, -1)
    settings = [SamplingSettings(temperature=t) for t in (1.0, 1.0, 1.0, 0.0)]

    ids, logprobs = sample_tokens(logits, settings, [0.0, 0.4, 0.99, 0.5], tokenizer_size=2)

    assert set(ids) == {0, 1}
    # Of all three tokens: what was sampled is scored as the trainer will score it.
    assert logprobs == pytest.approx([-9.000247] * 4, abs=1e-5)


@pytest.mark.parametrize("vocabulary", [255, 256, 1000])
def test_each_draw_finds_its_token_in_a_vocabulary_of_any_size(vocabulary):
    random = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(vocabulary, generator=random)
    # Whole stretches without probability, at the end too.
    logits[40:60] = logits[-30:] = -1e30
    draws = torch.rand(1998, dtype=torch.float64, generator=random).tolist()
    draws += [0.0, 1 - 2**-53]
    upto = logits.double().softmax(-1).cumsum(-1)

    ids, _ = sample_tokens(
        logits.expand(2000, -1), [SamplingSettings(temperature=1.0)] * 2000, draws
    )

    for token, draw in zip(ids, draws, strict=True):
        before = upto[token - 1].item() if token else 0.0
        assert before - 1e-6 < 1 - draw < upto[token].item() + 1e-6
        assert logits[token] > -1e30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_that_says_what_to_do(broken, temperature):
    logits = torch.tensor([[0.0, broken]])

    with pytest.raises(ModelError, match="not finite") as caught:
        sample_tokens(logits, [SamplingSettings(temperature=temperature)], [0.5])
    assert "fp32" in caught.value.fix

"""Hybrids are sampled by CUDA graphs, in which a row that waits keeps its states."""

import pytest
import torch

from fakes.decoding import engine_for, play_replies, random_prompts, sequence_of
from fakes.families import build_family
from fakes.tiny_models import build_tokenizer
from stillroom.models.load import LoadedModel
from stillroom.models.resolve import ModelLocation
from stillroom.types import SamplingSettings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "bamba", "nemotron-h"])
@torch.no_grad()
def test_recorded_steps_give_the_log_probabilities_of_one_forward_pass(name):
    tokenizer = build_tokenizer()
    model = build_family(name, tokenizer).to("cuda")
    location = ModelLocation(name, name, is_local=True)
    loaded = LoadedModel(location, model, tokenizer, frozenset())
    settings = [SamplingSettings(temperature=1.0, max_tokens=n) for n in (40, 4, 30, 12)]
    prompts = random_prompts((5, 1, 30, 12), seed=3)
    sequences = [
        sequence_of(p, s, seed=i) for i, (p, s) in enumerate(zip(prompts, settings, strict=True))
    ]
    engine = engine_for(loaded, max_rows=3)

    play_replies(engine, sequences, random_prompts((2, 9, 3, 1), seed=4))

    assert engine.graph_error is None
    for sequence in sequences:
        ids = torch.tensor([sequence.ids], device="cuda")
        exact = model(ids).logits[0, :-1].double().log_softmax(-1)
        exact = exact.gather(1, ids[0, 1:, None])[:, 0].tolist()
        for found, known, is_sampled in zip(
            sequence.logprobs[1:], exact, sequence.sampled[1:], strict=True
        ):
            assert not is_sampled or found == pytest.approx(known, abs=1e-3)

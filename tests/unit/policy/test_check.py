import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from fakes.tiny_models import ARCHITECTURES, build_tokenizer
from stillroom.errors import ModelError
from stillroom.models.load import LoadedModel, stop_token_ids
from stillroom.models.resolve import ModelLocation
from stillroom.policy.check import check_decoding


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_supported_architecture_passes(architecture, tiny_models):
    check_decoding(tiny_models.load(architecture))


def test_half_precision_passes(tiny_models):
    loaded = tiny_models.load("qwen3")
    loaded.model.to(torch.bfloat16)

    check_decoding(loaded)


def test_a_model_that_needs_another_kind_of_mask_is_refused_with_another_way():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=352, hidden_size=32, n_layer=2, n_head=4)
    model = BloomForCausalLM(config).eval()
    tokenizer = build_tokenizer()
    location = ModelLocation("bloom", "bloom", is_local=True)
    loaded = LoadedModel(location, model, tokenizer, stop_token_ids(model, tokenizer))

    with pytest.raises(ModelError, match="BloomForCausalLM cannot be sampled") as caught:
        check_decoding(loaded)

    assert "vLLM" in caught.value.fix


def test_a_model_whose_cache_remembers_something_else_is_refused(tiny_models, monkeypatch):
    loaded = tiny_models.load("llama")
    attention = loaded.model.model.layers[0].self_attn
    forward = attention.forward

    def forgetful(*args, past_key_values=None, **more):
        if past_key_values is not None:
            more["attention_mask"] = torch.zeros_like(more["attention_mask"])
            more["attention_mask"][..., -1] = True
        return forward(*args, past_key_values=past_key_values, **more)

    monkeypatch.setattr(attention, "forward", forgetful)

    with pytest.raises(ModelError, match="gives other probabilities"):
        check_decoding(loaded)

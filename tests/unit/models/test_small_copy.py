"""A model's small copy has its layers' types and boundaries, and few numbers."""

import pytest
import torch
import transformers

from stillroom.models.small_copy import build_copy, small_configs


@pytest.mark.parametrize(
    ("config_class", "num_layers", "boundaries"),
    [
        # The classes' own sizes are those of released models, of 1 to 9 billion weights.
        ("Qwen3_5TextConfig", 4, {}),
        ("GraniteMoeHybridConfig", 2, {"mamba_chunk_size": 16}),
        ("Gemma4TextConfig", 6, {"sliding_window": 8}),
        ("Zamba2Config", 7, {"chunk_size": 16}),
    ],
)
def test_a_copy_of_a_released_models_shape_is_small_and_runs(config_class, num_layers, boundaries):
    config = getattr(transformers, config_class)()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    copied = build_copy(type(config), small_configs(model)[0])

    assert copied.config.num_hidden_layers == num_layers
    assert {name: getattr(copied.config, name) for name in boundaries} == boundaries
    assert sum(p.numel() for p in copied.parameters()) < 2_000_000
    assert torch.isfinite(copied(torch.arange(9)[None], use_cache=False).logits).all()


def test_the_original_context_of_each_kind_of_rope_comes_near():
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, pad_token_id=0,
        num_attention_heads=2, num_key_value_heads=2, rope_parameters=rope,
        original_max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)

    copied = build_copy(type(config), small_configs(model)[0])

    assert copied.config.rope_parameters["original_max_position_embeddings"] == 24

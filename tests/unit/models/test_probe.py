"""A model runs many sequences at once only in ways that leave every logit as it is."""

import pytest
import torch
import transformers

from fakes.families import build_family
from stillroom.models.lm_head import HeadRunner
from stillroom.models.probe import choose_passes


@pytest.mark.parametrize("family", ["qwen2.5-sliding", "gemma3n", "deepseek-v3", "phi4-mini"])
def test_families_whose_windows_packs_know_are_packed(family):
    head = HeadRunner(build_family(family))

    choose_passes(head)

    assert head.rules.layout == "packed"
    assert head.notes == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_only_the_mask_holds_switches_packing_off(dtype):
    # A window of 4096 tokens, as released checkpoints have: no short sequence would show it.
    model = build_family("qwen2-moe", sliding_window=4096).to(dtype)
    head = HeadRunner(model)

    choose_passes(head)

    assert head.rules.layout == "padded"
    assert "rows of Qwen2MoeForCausalLM are padded" in head.notes[0]


@pytest.mark.parametrize("family", ["qwen3.5", "granite4-dense", "lfm2", "nemotron-h", "llama4"])
def test_recurrent_layers_and_chunks_are_padded(family):
    head = HeadRunner(build_family(family))
    head.check()

    choose_passes(head)

    assert head.rules.layout == "padded"


def test_rows_run_one_by_one_where_tokens_pick_the_few_that_they_attend_to():
    # transformers picks them among the padding too. 2048 are picked, as in released checkpoints.
    config = transformers.DeepseekV32Config(
        vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=2048, index_n_heads=2,
        index_head_dim=16, first_k_dense_replace=2,
    )  # fmt: skip
    head = HeadRunner(transformers.AutoModelForCausalLM.from_config(config))

    choose_passes(head)

    assert head.rules.layout == "alone"
    assert "rows of DeepseekV32ForCausalLM are run one by one" in head.notes[0]


def test_rows_that_padding_would_change_run_one_by_one(monkeypatch):
    model = build_family("seed-oss", hidden_size=40)
    body = type(model.model)
    forward = body.forward

    def mixing(self, input_ids=None, **kwargs):
        output = forward(self, input_ids=input_ids, **kwargs)
        # As if layers took the mean over a whole row, padding included.
        output.last_hidden_state = output.last_hidden_state * (1 + input_ids.shape[1] / 50)
        return output

    monkeypatch.setattr(body, "forward", mixing)
    monkeypatch.setattr("stillroom.models.probe.enable_packing", lambda _model: False)
    head = HeadRunner(model)
    choose_passes(head)

    assert head.rules.layout == "alone"
    assert len(head.notes) == 1
    assert "rows of SeedOssForCausalLM are run one by one" in head.notes[0]


def test_the_probe_leaves_random_numbers_and_the_mode_alone():
    model = build_family("olmo2", hidden_size=16).train()
    state = torch.get_rng_state()

    choose_passes(HeadRunner(model))

    assert torch.equal(torch.get_rng_state(), state)
    assert model.training

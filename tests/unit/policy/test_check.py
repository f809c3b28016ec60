from collections.abc import Callable

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.bamba import modeling_bamba

from fakes.decoding import (
    as_loaded,
    assert_logprobs,
    decode_all,
    loaded_family,
    random_prompts,
    sequence_of,
)
from fakes.families import build_family
from fakes.tiny_models import ARCHITECTURES, build_tokenizer
from stillroom.errors import ModelError
from stillroom.models.load import LoadedModel
from stillroom.policy.check import check_decoding
from stillroom.policy.passes import PlainPasses, SlotPasses, passes_for
from stillroom.types import SamplingSettings


def assert_exact(loaded: LoadedModel, *, before_scoring: Callable[[], object] = int) -> None:
    settings = SamplingSettings(temperature=1.0, max_tokens=8)
    prompts = random_prompts((20, 3, 31))
    sequences = [sequence_of(p, settings, seed=i) for i, p in enumerate(prompts)]
    decode_all(loaded, sequences, max_rows=2)
    before_scoring()
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_supported_architecture_passes(architecture, tiny_models):
    assert check_decoding(tiny_models.load(architecture)) == []


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "minimax", "llama-dynamic", "llama4"])
def test_recurrent_models_and_stretched_positions_are_sampled_in_batches(name):
    loaded = loaded_family(name)

    assert check_decoding(loaded) == []

    assert isinstance(passes_for(loaded.model, num_slots=1), SlotPasses)
    assert_exact(loaded)


def test_half_precision_passes(tiny_models):
    loaded = tiny_models.load("qwen3")
    loaded.model.to(torch.bfloat16)

    assert check_decoding(loaded) == []


def test_a_model_that_forgets_its_state_between_chunks_is_given_tokens_singly():
    loaded = loaded_family("jamba")

    (note,) = check_decoding(loaded)

    assert "prompt tokens run one by one" in note
    assert isinstance(passes_for(loaded.model, num_slots=1), SlotPasses)
    assert_exact(loaded)


def test_a_mamba_model_with_another_formula_is_sampled_by_its_own(monkeypatch):
    original = modeling_bamba.mamba2_chunk_scan

    def other(*args, D, **more):
        return original(*args, D=0.5 * D, **more)

    step = modeling_bamba.mamba2_selective_state_update

    def other_step(*args, **more):
        return step(*args[:6], 0.5 * args[6], **more)

    monkeypatch.setattr(modeling_bamba, "mamba2_chunk_scan", other)
    monkeypatch.setattr(modeling_bamba, "mamba2_selective_state_update", other_step)
    loaded = as_loaded(build_family("bamba", build_tokenizer()))

    (note,) = check_decoding(loaded)

    assert "prompt tokens run one by one" in note
    assert_exact(loaded)


def test_a_model_that_needs_another_kind_of_mask_is_sampled_row_by_row():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=352, hidden_size=32, n_layer=2, n_head=4)
    loaded = as_loaded(BloomForCausalLM(config).eval())

    (note,) = check_decoding(loaded)

    assert note.startswith("BloomForCausalLM is sampled row by row")
    assert isinstance(passes_for(loaded.model, num_slots=1), PlainPasses)
    assert_exact(loaded)


def test_a_model_whose_cache_remembers_something_else_is_sampled_without_it(
    tiny_models, monkeypatch
):
    loaded = tiny_models.load("llama")
    attention = loaded.model.model.layers[0].self_attn
    forward = attention.forward

    def forgetful(*args, past_key_values=None, **more):
        if past_key_values is not None:
            hidden = args[0] if args else more["hidden_states"]
            length = hidden.shape[1]
            more["attention_mask"] = torch.eye(length, dtype=torch.bool)[None, None]
            return forward(*args, **more)
        return forward(*args, past_key_values=past_key_values, **more)

    monkeypatch.setattr(attention, "forward", forgetful)

    (note,) = check_decoding(loaded)

    assert "without a cache" in note
    assert "nats" in note
    assert_exact(loaded, before_scoring=monkeypatch.undo)


def test_a_model_that_cannot_be_run_at_all_is_refused_with_another_way(tiny_models, monkeypatch):
    loaded = tiny_models.load("llama")

    def broken(*args, **more):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(loaded.model.model.layers[0].self_attn, "forward", broken)

    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be sampled") as caught:
        check_decoding(loaded)

    assert "no kernel" in caught.value.problem
    assert "vLLM" in caught.value.fix

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from fakes.decoding import (
    SAMPLED,
    assert_logprobs,
    decode_all,
    engine_for,
    full_logprobs,
    generated,
    play_replies,
    random_prompts,
    run_to_end,
    sequence_of,
)
from fakes.tiny_models import ARCHITECTURES, build_tokenizer
from stillroom.models.load import LoadedModel
from stillroom.models.resolve import ModelLocation
from stillroom.policy.passes import PlainPasses, passes_for, set_sampling_mode
from stillroom.types import SamplingSettings

RAGGED = (3, 45, 17, 1, 26, 9)


@pytest.fixture(params=ARCHITECTURES)
def loaded(request, tiny_models):
    return tiny_models.load(request.param, "chatml")


@pytest.fixture
def gemma(tiny_models):
    return tiny_models.load("gemma3", "chatml")


def test_greedy_turns_are_those_of_transformers_token_for_token(loaded):
    prompts = random_prompts(RAGGED)

    # Fewer rows than sequences: some wait, and take over rows of others that have ended.
    found = decode_all(loaded, [sequence_of(prompt) for prompt in prompts], max_rows=3)

    assert found == [generated(loaded, prompt) for prompt in prompts]


def test_log_probabilities_are_those_of_one_forward_pass_over_the_whole(loaded):
    prompts = random_prompts(RAGGED, seed=1)
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]

    decode_all(loaded, sequences, max_rows=3)

    # A gated delta net rounds otherwise in its chunks than token by token.
    rounding = 1e-4 if loaded.model.config.model_type.startswith("qwen3_5") else 1e-5
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=rounding)


def test_a_turn_after_a_tools_reply_is_that_of_transformers(loaded):
    prompts = random_prompts((20, 4, 33, 11), seed=2)
    first_turns = [generated(loaded, prompt) for prompt in prompts]
    for replied in (1, 2, 30):
        replies = random_prompts((replied, 12, replied, 5), seed=3)
        sequences = [sequence_of(prompt) for prompt in prompts]
        engine = engine_for(loaded)

        play_replies(engine, sequences, replies)

        for sequence, once, reply in zip(sequences, first_turns, replies, strict=True):
            assert sequence.ids == generated(loaded, [*once, *reply]), replied
            assert sequence.sampled[len(once) : len(once) + len(reply)] == [False] * len(reply)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "phi3"])
def test_long_conversations_outgrow_the_cache_and_stay_exact(tiny_models, architecture):
    loaded = tiny_models.load(architecture, "chatml")
    prompts = random_prompts((126, 5, 250), seed=4)
    long = SamplingSettings(temperature=0.0, max_tokens=40)

    found = decode_all(loaded, [sequence_of(prompt, long) for prompt in prompts])

    assert found == [generated(loaded, prompt, max_tokens=40) for prompt in prompts]


def without_stops(loaded):
    return LoadedModel(loaded.location, loaded.model, loaded.tokenizer, frozenset())


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_a_turn_ends_after_its_most_tokens(gemma, max_tokens):
    settings = SamplingSettings(temperature=1.0, max_tokens=max_tokens)
    sequence = sequence_of(random_prompts((10,))[0], settings)

    decode_all(without_stops(gemma), [sequence])

    assert sequence.finish_reason == "length"
    assert len(sequence.ids) == 10 + max_tokens


def test_a_conversation_never_grows_beyond_its_context(gemma):
    prompts = random_prompts((10, 31, 32, 50))
    sequences = [sequence_of(p, SamplingSettings(temperature=1.0)) for p in prompts]

    decode_all(without_stops(gemma), sequences, max_context=32)

    assert [sequence.finish_reason for sequence in sequences] == ["context"] * 4
    assert [len(sequence.ids) for sequence in sequences] == [32, 32, 32, 50]
    assert not any(sequences[3].sampled)


def test_a_stop_token_at_the_end_of_the_context_is_a_stop(gemma):
    prompt = random_prompts((10,))[0]
    whole = decode_all(gemma, [sequence_of(prompt, SamplingSettings(temperature=1.0), seed=1)])[0]
    sequence = sequence_of(prompt, SamplingSettings(temperature=1.0), seed=1)

    decode_all(gemma, [sequence], max_context=len(whole))

    assert sequence.finish_reason == "stop"
    assert sequence.ids == whole


def test_padding_ids_of_the_vocabulary_are_never_sampled(tiny_models):
    loaded = tiny_models.load("llama", "chatml", vocab_size=416)
    settings = SamplingSettings(temperature=2.0, max_tokens=60)
    prompts = random_prompts((5,) * 4)
    sequences = [sequence_of(p, settings, seed=i) for i, p in enumerate(prompts)]

    decode_all(loaded, sequences)

    sampled = [token for sequence in sequences for token in sequence.ids[5:]]
    assert len(sampled) > 20
    assert max(sampled) < len(loaded.tokenizer)
    for sequence in sequences:
        wanted = full_logprobs(loaded, sequence.ids)[5:]
        assert sequence.logprobs[5:] == pytest.approx(wanted, abs=1e-5)


def test_learnt_positions_are_not_asked_for_beyond_the_context():
    tokenizer = build_tokenizer("chatml")
    config = GPT2Config(
        vocab_size=352, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=0, eos_token_id=tokenizer.eos_token_id, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    location = ModelLocation("gpt2", "gpt2", is_local=True)
    loaded = LoadedModel(location, model, tokenizer, frozenset({tokenizer.eos_token_id}))
    # Read in one pass: the short one is padded by 30 tokens.
    prompts = random_prompts((32, 2), seed=10)
    settings = SamplingSettings(temperature=0.0, max_tokens=4)
    near_end = sequence_of(random_prompts((56,), seed=11)[0], settings)
    engine = engine_for(loaded, max_context=64)
    engine.request_turn(near_end)
    while not near_end.is_paused:
        engine.step()
    near_end.append_given(prompts[1])
    fresh = sequence_of(prompts[0], settings)
    before = list(near_end.ids)

    engine.request_turn(near_end)
    engine.request_turn(fresh)
    run_to_end(engine)

    assert fresh.ids == generated(loaded, prompts[0], max_tokens=4)
    wanted = generated(loaded, before, max_tokens=min(4, 64 - len(before)))
    assert near_end.ids == wanted


def test_layers_that_keep_something_unknown_are_sampled_row_by_row(tiny_models):
    loaded = tiny_models.load("gemma3", "chatml", seed=1)
    short = SamplingSettings(temperature=0.0, max_tokens=6)
    wanted = [generated(loaded, prompt, max_tokens=6) for prompt in random_prompts((9, 14))]
    loaded.model.config.layer_types = ["sliding_attention", "indexed_attention", "full_attention"]
    assert isinstance(passes_for(loaded.model, num_slots=1), PlainPasses)
    loaded.model.config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    set_sampling_mode(loaded.model, "row by row")

    sequences = [sequence_of(prompt, short) for prompt in random_prompts((9, 14))]
    assert decode_all(loaded, sequences, max_rows=3) == wanted

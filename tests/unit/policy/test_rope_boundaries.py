"""Sampling beyond the original context of RoPE, where frequencies depend on the pass' length."""

import pytest

from fakes.decoding import (
    assert_logprobs,
    decode_all,
    engine_for,
    generated,
    loaded_family,
    play_replies,
    random_prompts,
    run_to_end,
    sequence_of,
)
from fakes.families import ORIGINAL_CONTEXT
from stillroom.types import SamplingSettings

SAMPLED = SamplingSettings(temperature=1.0, max_tokens=8)
GREEDY = SamplingSettings(temperature=0.0, max_tokens=8)
# Within the original context, up to it, across it and beyond it.
LENGTHS = tuple(ORIGINAL_CONTEXT + step for step in (-18, -9, -8, -3, 0, 1, 12))


@pytest.mark.parametrize("name", ["phi4-mini", "phimoe", "llama-dynamic"])
def test_log_probabilities_are_those_of_one_pass_on_both_sides_of_the_boundary(name):
    loaded = loaded_family(name)
    prompts = random_prompts(LENGTHS, seed=1)
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]

    decode_all(loaded, sequences, max_rows=5)

    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


def test_a_reply_that_crosses_the_boundary_changes_no_turn_from_that_of_transformers():
    loaded = loaded_family("phi4-mini")
    prompts = random_prompts((5, 9, 20, 30), seed=2)
    replies = random_prompts((3, 12, 5, 1), seed=3)
    sequences = [sequence_of(prompt, GREEDY) for prompt in prompts]
    engine = engine_for(loaded)

    play_replies(engine, sequences, replies)

    for sequence, prompt, reply in zip(sequences, prompts, replies, strict=True):
        once = generated(loaded, prompt, max_tokens=8)
        assert sequence.ids == generated(loaded, [*once, *reply], max_tokens=8)
        assert_logprobs(loaded, sequence, tolerance=1e-3)


def test_a_prefix_is_not_copied_to_a_conversation_beyond_the_boundary():
    loaded = loaded_family("phi4-mini")
    trunk, leaf = random_prompts((20, 15), seed=4)
    prompts = [trunk, [*trunk, *leaf], [*trunk, *leaf], trunk]
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]
    engine = engine_for(loaded)
    for sequence in sequences:
        engine.request_turn(sequence)
    run_to_end(engine)

    assert engine.tokens_shared == len(trunk)
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)

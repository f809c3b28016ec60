"""Sampling models whose layers keep a state: it knows no padding, and cannot be cut back."""

import functools

import pytest

from fakes.decoding import (
    assert_logprobs,
    decode_all,
    engine_for,
    random_prompts,
    run_to_end,
    sequence_of,
)
from fakes.families import FAMILIES, build_family
from fakes.tiny_models import build_tokenizer
from stillroom.models.load import LoadedModel
from stillroom.models.resolve import ModelLocation
from stillroom.policy.passes import passes_for
from stillroom.types import SamplingSettings

NAMES = ["qwen3.5", "lfm2", "bamba", "minimax", "mamba2"]
GREEDY = SamplingSettings(temperature=0.0, max_tokens=6)
SAMPLED = SamplingSettings(temperature=1.0, max_tokens=12)


@functools.cache
def family(name: str) -> LoadedModel:
    tokenizer = build_tokenizer()
    model = build_family(name, tokenizer)
    location = ModelLocation(name, name, is_local=True)
    return LoadedModel(location, model, tokenizer, frozenset({tokenizer.eos_token_id}))


@pytest.fixture(params=NAMES)
def loaded(request) -> LoadedModel:
    return family(request.param)


def lengths_of(loaded: LoadedModel) -> list[int]:
    """Lengths on both sides of the last boundary, and the shortest."""
    edge = max(FAMILIES[loaded.location.name].boundaries)
    return [edge - 1, 1, edge + 2, 2 * edge + 3]


def test_log_probabilities_are_those_of_one_forward_pass_over_the_whole(loaded):
    prompts = random_prompts(lengths_of(loaded), seed=3)
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]

    decode_all(loaded, sequences, max_rows=3)

    assert type(passes_for(loaded.model, num_slots=1)).__name__ == "SlotPasses"
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


@pytest.mark.parametrize("loaded", ["qwen3.5", "lfm2"], indirect=True)
def test_a_shared_prefix_is_run_once_and_copied_where_it_ends(loaded):
    trunk, *leaves = random_prompts((40, 6, 1, 30), seed=4)
    prompts = [trunk, trunk, *([*trunk, *leaf] for leaf in leaves), [*trunk, *leaves[2]]]
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]
    engine = engine_for(loaded, max_rows=len(prompts))
    for sequence in sequences:
        engine.ask(sequence)
    run_to_end(engine)

    assert engine.tokens_shared >= 4 * (len(trunk) - 1) + len(leaves[2])
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


def test_a_row_that_waits_for_its_tool_keeps_its_state_while_others_go_on():
    loaded = family("qwen3.5")
    prompts = random_prompts((30, 9, 20, 12, 33), seed=5)
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]
    waiting = sequences[1]
    engine = engine_for(loaded, max_rows=5)
    for sequence in sequences:
        engine.ask(sequence)
    while not waiting.is_paused:
        engine.step()
    for _ in range(3):
        engine.step()
    engine.release(sequences[0])
    engine.step()
    waiting.give(random_prompts((21,), seed=6)[0])
    engine.ask(waiting)
    run_to_end(engine)

    for sequence in sequences[1:]:
        assert_logprobs(loaded, sequence, tolerance=1e-3)

"""Sampling models whose layers keep a state: it knows no padding, and cannot be cut back."""

import pytest

from fakes.decoding import (
    assert_logprobs,
    decode_all,
    engine_for,
    loaded_family,
    random_prompts,
    run_to_end,
    sequence_of,
)
from fakes.families import FAMILIES
from stillroom.models.load import LoadedModel
from stillroom.policy.passes import passes_for
from stillroom.types import SamplingSettings

NAMES = ["qwen3.5", "lfm2", "bamba", "minimax", "mamba2"]
SAMPLED = SamplingSettings(temperature=1.0, max_tokens=12)


@pytest.fixture(params=NAMES)
def loaded(request) -> LoadedModel:
    return loaded_family(request.param)


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
        engine.request_turn(sequence)
    run_to_end(engine)

    assert engine.tokens_shared >= 4 * (len(trunk) - 1) + len(leaves[2])
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)

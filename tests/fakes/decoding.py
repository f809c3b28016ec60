"""Running a decode engine in tests, and what transformers gives for the same tokens."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fakes.families import build_family
from fakes.tiny_models import build_tokenizer
from stillroom.models.load import LoadedModel, stop_token_ids
from stillroom.models.resolve import ModelLocation
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.types import SamplingSettings

GREEDY = SamplingSettings(temperature=0.0, max_tokens=24)
SAMPLED = SamplingSettings(temperature=1.0, max_tokens=24)
_MAX_STEPS = 3000


def as_loaded(model: Any, name: str = "tiny") -> LoadedModel:
    """Returns the model with the tokenizer of the tiny ones, as the engine loads it."""
    tokenizer = build_tokenizer()
    location = ModelLocation(name, name, is_local=True)
    return LoadedModel(location, model, tokenizer, stop_token_ids(model, tokenizer))


@functools.cache
def loaded_family(name: str) -> LoadedModel:
    """Returns a family's tiny model, which is built once."""
    return as_loaded(build_family(name, build_tokenizer()), name)


def random_prompts(lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(length)] for length in lengths]


def sequence_of(
    prompt: Sequence[int], settings: SamplingSettings = GREEDY, *, seed: int = 0
) -> DecodedSequence:
    sequence = DecodedSequence(settings, rng=random.Random(seed))
    sequence.append_given(prompt)
    return sequence


def engine_for(loaded: LoadedModel, *, max_rows: int = 4, max_context: int = 512) -> DecodeEngine:
    return DecodeEngine(loaded, max_rows=max_rows, max_context=max_context)


def run_to_end(
    engine: DecodeEngine,
    on_turn: Callable[[DecodedSequence], None] = lambda _sequence: None,
) -> None:
    """Steps until nothing is left to do; `on_turn` may ask for more, a finished turn leaves."""
    for _ in range(_MAX_STEPS):
        if not engine.has_work:
            return
        for sequence in engine.step():
            on_turn(sequence)
            if sequence.is_paused:
                engine.release(sequence)
    raise AssertionError("the engine did not come to an end")


def decode_all(
    loaded: LoadedModel, sequences: Sequence[DecodedSequence], **options: Any
) -> list[list[int]]:
    """Samples one turn of every sequence and returns their tokens."""
    engine = engine_for(loaded, **options)
    for sequence in sequences:
        engine.request_turn(sequence)
    run_to_end(engine)
    return [sequence.ids for sequence in sequences]


def play_replies(
    engine: DecodeEngine, sequences: Sequence[DecodedSequence], replies: Sequence[Sequence[int]]
) -> None:
    """Samples two turns of every sequence, with its reply between them."""
    waiting = dict(zip(sequences, replies, strict=True))

    def answer(sequence: DecodedSequence) -> None:
        if sequence in waiting:
            sequence.append_given(waiting.pop(sequence))
            engine.request_turn(sequence)

    for sequence in sequences:
        engine.request_turn(sequence)
    run_to_end(engine, answer)


def assert_logprobs(loaded: LoadedModel, sequence: DecodedSequence, *, tolerance: float) -> None:
    """Asserts that a sequence's log-probabilities (nats) are those of one pass, given tokens' 0."""
    wanted = full_logprobs(loaded, sequence.ids)
    for found, known, is_sampled in zip(sequence.logprobs, wanted, sequence.sampled, strict=True):
        assert found == pytest.approx(known if is_sampled else 0.0, abs=tolerance)


def generated(loaded: LoadedModel, prompt: Sequence[int], *, max_tokens: int = 24) -> list[int]:
    """Returns the prompt and what transformers' own generate appends greedily."""
    ids = torch.tensor([list(prompt)])
    output: Any = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(loaded.stop_ids),
        pad_token_id=0,
    )
    return output[0].tolist()


@torch.no_grad()
def full_logprobs(loaded: LoadedModel, ids: Sequence[int]) -> list[float]:
    """Returns each token's log-probability in one forward pass; 0.0 for the first."""
    logits = loaded.model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
    return [0.0, *(logits[i - 1, ids[i]].item() for i in range(1, len(ids)))]

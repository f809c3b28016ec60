"""Decode steps are recorded once and done again; a recorder of CUDA graphs is stood in for."""

import functools
import math

import pytest
import torch

from fakes.decoding import (
    assert_logprobs,
    engine_for,
    play_replies,
    random_prompts,
    run_to_end,
    sequence_of,
)
from fakes.families import build_family
from fakes.tape import TapeRecorder
from fakes.tiny_models import build_tokenizer
from stillroom.models.load import LoadedModel
from stillroom.models.resolve import ModelLocation
from stillroom.policy.check import check_decoding
from stillroom.policy.graphs import recorder_for, rounded_attended, rounded_rows
from stillroom.types import SamplingSettings

SHORT = SamplingSettings(temperature=1.0, max_tokens=7)


@pytest.mark.parametrize(
    ("num_rows", "most", "rows"), [(1, 64, 1), (3, 64, 4), (33, 64, 64), (33, 48, 48), (48, 48, 48)]
)
def test_rows_are_rounded_to_few_sizes(num_rows, most, rows):
    assert rounded_rows(num_rows, limit=most) == rows


@pytest.mark.parametrize(
    ("num_attended", "most", "attended"),
    [
        (1, 4096, 256),
        (256, 4096, 256),
        (257, 4096, 512),
        (2049, 40960, 2560),
        (9000, 40960, 10240),
        (300, 400, 400),
        (100, 64, 100),
    ],
)
def test_attended_tokens_are_rounded_up_by_a_quarter_at_most(num_attended, most, attended):
    assert rounded_attended(num_attended, limit=most) == attended


@functools.cache
def family(name: str) -> LoadedModel:
    tokenizer = build_tokenizer()
    location = ModelLocation(name, name, is_local=True)
    model = build_family(name, tokenizer)
    return LoadedModel(location, model, tokenizer, frozenset({tokenizer.eos_token_id}))


@pytest.fixture
def tape(monkeypatch):
    """Records the steps of every engine, on a processor, as CUDA graphs would on a GPU."""
    recorder = TapeRecorder()
    monkeypatch.setattr("stillroom.policy.decode.recorder_for", lambda _device: recorder)
    return recorder


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gemma3", "qwen3.5", "lfm2", "nemotron-h"])
def test_recorded_steps_give_the_log_probabilities_of_one_forward_pass(tape, name):
    loaded = family(name)
    # Two turns of four conversations over three slots: rows wait, leave and move meanwhile.
    prompts = random_prompts((5, 1, 30, 12), seed=3)
    sequences = [sequence_of(p, SHORT, seed=i) for i, p in enumerate(prompts)]
    engine = engine_for(loaded, max_rows=3)

    play_replies(engine, sequences, random_prompts((2, 9, 3, 1), seed=4))

    assert engine.graph_refusal is None
    assert tape.num_replayed > 4 * tape.num_recorded > 0
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


def test_a_row_that_waits_for_its_tool_keeps_its_states_in_a_recorded_step(tape):
    loaded = family("qwen3.5")
    prompts = random_prompts((30, 9, 20, 12), seed=5)
    lengths = (40, 4, 40, 40)
    sequences = [
        sequence_of(p, SamplingSettings(temperature=1.0, max_tokens=n), seed=i)
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    waiting = sequences[1]
    engine = engine_for(loaded)
    for sequence in sequences:
        engine.ask(sequence)
    while not waiting.is_paused:
        engine.step()
    recorded = tape.num_recorded
    for _ in range(6):
        engine.step()
    assert (tape.num_recorded, tape.num_replayed) == (recorded + 1, 2 + 5)
    waiting.give(random_prompts((21,), seed=6)[0])
    engine.ask(waiting)
    run_to_end(engine)

    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


def test_a_model_that_looks_at_its_numbers_is_sampled_without_graphs_and_a_note_says_so(tape):
    loaded = family("smollm3")

    def look(_module, _inputs, output):
        return output if output.sum().item() < math.inf else None

    hook = loaded.model.model.norm.register_forward_hook(look)
    try:
        notes = check_decoding(loaded)
    finally:
        hook.remove()

    [note] = notes
    assert note.startswith("SmolLM3ForCausalLM is sampled without CUDA graphs")
    assert note.endswith("aten::_local_scalar_dense waits for the device")
    assert check_decoding(loaded) == []


def test_a_step_that_cannot_be_recorded_is_not_tried_again(monkeypatch):
    class Refusing:
        tries = 0

        def record(self, work):
            self.tries += 1
            raise RuntimeError("operation not permitted\nmore lines")

    recorder = Refusing()
    monkeypatch.setattr("stillroom.policy.decode.recorder_for", lambda _device: recorder)
    loaded = family("qwen3.5")
    sequences = [sequence_of(p, SHORT, seed=i) for i, p in enumerate(random_prompts((5, 12)))]
    engine = engine_for(loaded)
    for sequence in sequences:
        engine.ask(sequence)

    run_to_end(engine)

    assert (recorder.tries, engine.graph_refusal) == (1, "operation not permitted")
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_nothing_is_recorded_without_cuda(device):
    assert recorder_for(torch.device(device)) is None

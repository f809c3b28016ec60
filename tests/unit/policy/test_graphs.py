"""Decode steps are recorded once and done again; a recorder of CUDA graphs is stood in for."""

import math

import pytest
import torch

from fakes.decoding import (
    assert_logprobs,
    engine_for,
    loaded_family,
    play_replies,
    random_prompts,
    run_to_end,
    sequence_of,
)
from fakes.tape import TapeRecorder
from stillroom.policy.check import check_decoding
from stillroom.policy.graphs import recorder_for, rounded_attended
from stillroom.types import SamplingSettings

SHORT = SamplingSettings(temperature=1.0, max_tokens=7)


@pytest.mark.parametrize(
    ("num_attended", "most", "attended"),
    [
        (257, 4096, 512),
        (2049, 40960, 2560),
        (300, 400, 400),
    ],
)
def test_attended_tokens_are_rounded_up_by_a_quarter_at_most(num_attended, most, attended):
    assert rounded_attended(num_attended, limit=most) == attended


@pytest.fixture
def tape(monkeypatch):
    """Records the steps of every engine, on a processor, as CUDA graphs would on a GPU."""
    recorder = TapeRecorder()
    monkeypatch.setattr("stillroom.policy.decode.recorder_for", lambda _device: recorder)
    return recorder


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gemma3", "qwen3.5", "lfm2", "nemotron-h"])
def test_recorded_steps_give_the_log_probabilities_of_one_forward_pass(tape, name):
    loaded = loaded_family(name)
    # Two turns of four conversations over three slots: rows wait, leave and move meanwhile.
    prompts = random_prompts((5, 1, 30, 12), seed=3)
    sequences = [sequence_of(p, SHORT, seed=i) for i, p in enumerate(prompts)]
    engine = engine_for(loaded, max_rows=3)

    play_replies(engine, sequences, random_prompts((2, 9, 3, 1), seed=4))

    assert engine.graph_error is None
    assert tape.num_replayed > 4 * tape.num_recorded > 0
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


def test_a_row_that_waits_for_its_tool_keeps_its_states_in_a_recorded_step(tape):
    loaded = loaded_family("qwen3.5")
    prompts = random_prompts((30, 9, 20, 12), seed=5)
    lengths = (40, 4, 40, 40)
    sequences = [
        sequence_of(p, SamplingSettings(temperature=1.0, max_tokens=n), seed=i)
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    waiting = sequences[1]
    engine = engine_for(loaded)
    for sequence in sequences:
        engine.request_turn(sequence)
    while not waiting.is_paused:
        engine.step()
    recorded = tape.num_recorded
    for _ in range(6):
        engine.step()
    assert (tape.num_recorded, tape.num_replayed) == (recorded + 1, 2 + 5)
    waiting.append_given(random_prompts((21,), seed=6)[0])
    engine.request_turn(waiting)
    run_to_end(engine)

    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


def test_a_model_that_looks_at_its_numbers_is_sampled_without_graphs_and_a_note_says_so(tape):
    loaded = loaded_family("smollm3")

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
    loaded = loaded_family("qwen3.5")
    sequences = [sequence_of(p, SHORT, seed=i) for i, p in enumerate(random_prompts((5, 12)))]
    engine = engine_for(loaded)
    for sequence in sequences:
        engine.request_turn(sequence)

    run_to_end(engine)

    assert (recorder.tries, engine.graph_error) == (1, "operation not permitted")
    for sequence in sequences:
        assert_logprobs(loaded, sequence, tolerance=1e-3)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_nothing_is_recorded_without_cuda(device):
    assert recorder_for(torch.device(device)) is None

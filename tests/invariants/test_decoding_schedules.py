"""Whatever joins, waits, goes on and leaves, every conversation is what it would be alone."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.decoding import engine_for, sequence_of
from stillroom.types import SamplingSettings

SAMPLING = SamplingSettings(temperature=1.0, max_tokens=12)
MAX_STEPS = 2000
# A gated delta net computes in float32, whatever its weights are, and rounds otherwise in chunks.
ROUNDING = {"gemma3": 1e-6, "mistral-sliding": 1e-6, "qwen3.5": 2e-5}
"""How far off a probability or a log-probability (nats) may be, by architecture."""


@dataclass(frozen=True)
class Plan:
    """How one conversation goes: when it comes, what it is given, how long its tools take."""

    arrives: int
    prompt: int
    begins_like: int
    """Prompts of the same number begin alike, however long they are."""
    replies: tuple[int, ...]
    delay: int
    leaves_early: bool


plans = st.builds(
    Plan,
    arrives=st.integers(0, 12),
    prompt=st.integers(1, 40),
    begins_like=st.integers(0, 3),
    replies=st.lists(st.integers(1, 25), max_size=2).map(tuple),
    delay=st.integers(0, 12),
    leaves_early=st.booleans(),
)


class Schedule:
    """Plays the plans over one engine, step by step."""

    def __init__(self, loaded, chosen, max_rows):
        self.engine = engine_for(loaded, max_rows=max_rows)
        rng = random.Random(0)
        self.tokens = lambda length: [rng.randrange(300) for _ in range(length)]
        self.plans = chosen
        beginnings = [self.tokens(40) for _ in range(4)]
        self.sequences = [
            sequence_of(beginnings[plan.begins_like][: plan.prompt], SAMPLING, seed=index)
            for index, plan in enumerate(chosen)
        ]
        self.replied = [0] * len(chosen)
        self.due = {plan.arrives: [] for plan in chosen}
        for index, plan in enumerate(chosen):
            self.due[plan.arrives].append(index)

    def play(self):
        for step in range(MAX_STEPS):
            for index in self.due.pop(step, []):
                self.engine.request_turn(self.sequences[index])
            if self.engine.has_work:
                for sequence in self.engine.step():
                    self.after_turn(self.sequences.index(sequence), step)
            elif not self.due:
                return
        raise AssertionError("the schedule did not come to an end")

    def after_turn(self, index, step):
        plan, done = self.plans[index], self.replied[index]
        if done == len(plan.replies) or (plan.leaves_early and done == 1):
            self.engine.release(self.sequences[index])
            return
        self.replied[index] += 1
        self.sequences[index].append_given(self.tokens(plan.replies[done]))
        self.due.setdefault(step + 1 + plan.delay, []).append(index)


@torch.no_grad()
def assert_as_if_alone(loaded, sequence, seed, *, rounding):
    """One forward pass over the whole, and the draws of its own seed, give the same tokens."""
    where = [i for i, is_sampled in enumerate(sequence.sampled) if is_sampled]
    logits = loaded.model(torch.tensor([sequence.ids])).logits[0]
    logprobs = logits[[i - 1 for i in where]].double().log_softmax(-1)
    upto = logprobs.exp().cumsum(-1)
    draws = random.Random(seed)
    for row, index in enumerate(where):
        token, draw = sequence.ids[index], 1 - draws.random()
        before = upto[row, token - 1].item() if token else 0.0
        # A draw this near to the border between two tokens may go to either.
        assert before - rounding < draw < upto[row, token].item() + rounding
        exact = logprobs[row, token].item()
        assert sequence.logprobs[index] == pytest.approx(exact, abs=2 * rounding)


@pytest.fixture(scope="module")
def models(tiny_models):
    loaded = {name: tiny_models.load(name, "chatml") for name in ROUNDING}
    for one in loaded.values():
        # Else what is rounded in another order is as far off as what is wrong.
        one.model.double()
    return loaded


@settings(max_examples=20)
@given(
    architecture=st.sampled_from(sorted(ROUNDING)),
    chosen=st.lists(plans, min_size=1, max_size=7),
    max_rows=st.integers(1, 6),
)
def test_every_schedule_gives_each_conversation_its_own_tokens(
    models, architecture, chosen, max_rows
):
    loaded = models[architecture]
    schedule = Schedule(loaded, chosen, max_rows)

    schedule.play()

    engine, sequences = schedule.engine, schedule.sequences
    assert engine.tokens_run + engine.tokens_shared == sum(s.num_cached for s in sequences)
    for index, sequence in enumerate(schedule.sequences):
        assert any(sequence.sampled)
        assert_as_if_alone(loaded, sequence, index, rounding=ROUNDING[architecture])

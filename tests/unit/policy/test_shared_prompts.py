"""What conversations begin with alike is run once, and what they become stays the same."""

import pytest

from fakes.decoding import (
    SAMPLED,
    decode_all,
    engine_for,
    generated,
    random_prompts,
    run_to_end,
    sequence_of,
)


@pytest.fixture
def qwen(tiny_models):
    return tiny_models.load("qwen3", "chatml")


def num_distinct(prompts):
    return len({tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)})


def num_answered(sequences, prompts):
    """Tokens behind the prompts that are run: all but the last of each."""
    return sum(len(s.ids) - len(p) - 1 for s, p in zip(sequences, prompts, strict=True))


def groups(size):
    """Three prompts, of which two have a long beginning in common, for `size` rollouts each."""
    system, first, second, other = random_prompts((40, 9, 17, 30))
    return [p for p in ([*system, *first], [*system, *second], other) for _ in range(size)]


def ask_all(engine, sequences):
    for sequence in sequences:
        engine.request_turn(sequence)


def test_a_groups_prompt_is_run_once(qwen):
    prompts = groups(3)
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]
    engine = engine_for(qwen, max_rows=9)
    ask_all(engine, sequences)

    run_to_end(engine)

    assert engine.tokens_run == num_distinct(prompts) + num_answered(sequences, prompts)
    alone = [decode_all(qwen, [sequence_of(p, SAMPLED, seed=i)]) for i, p in enumerate(prompts)]
    assert [[s.ids] for s in sequences] == alone


@pytest.mark.parametrize("max_rows", [1, 4])
def test_who_joins_later_takes_over_what_is_still_there(qwen, max_rows):
    prompts = groups(4)
    sequences = [sequence_of(p, SAMPLED, seed=i) for i, p in enumerate(prompts)]
    engine = engine_for(qwen, max_rows=max_rows)
    ask_all(engine, sequences)

    run_to_end(engine)

    # Of a prompt that was run before, the last token is run again.
    again = engine.tokens_run - num_distinct(prompts) - num_answered(sequences, prompts)
    assert 0 < again <= len(prompts) - 3
    assert engine.tokens_run + engine.tokens_shared == sum(s.num_cached for s in sequences)
    alone = [decode_all(qwen, [sequence_of(p, SAMPLED, seed=i)]) for i, p in enumerate(prompts)]
    assert [[s.ids] for s in sequences] == alone


def test_after_tools_reply_only_the_replies_are_run(qwen):
    prompts = groups(2)
    replies = random_prompts((12,) * len(prompts), seed=3)
    sequences = [sequence_of(prompt) for prompt in prompts]
    engine = engine_for(qwen, max_rows=len(prompts))
    turns = dict.fromkeys(range(len(prompts)), 1)

    def answer(sequence):
        index = sequences.index(sequence)
        if turns[index] < 3:
            turns[index] += 1
            sequence.append_given(replies[index])
            engine.request_turn(sequence)

    ask_all(engine, sequences)
    run_to_end(engine, answer)

    assert set(turns.values()) == {3}
    assert engine.tokens_run == num_distinct(prompts) + num_answered(sequences, prompts)
    once = generated(qwen, prompts[0])
    twice = generated(qwen, [*once, *replies[0]])
    assert sequences[0].ids == generated(qwen, [*twice, *replies[0]])

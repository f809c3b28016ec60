"""Prefixes that sequences share, in group_by_prefix and in the cache."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.models.prefixes import (
    MIN_SHARED,
    PrefixIndex,
    SharedPrefix,
    common_prefix_length,
    group_by_prefix,
    shared_prefixes,
    split_shared_prefixes,
)

START = list(range(100, 120))
small = st.integers(0, 2)
"""Few tokens, so that sequences often begin alike."""


def reported(layout, sequences, index):
    pieces = [layout.pieces[i] for i in layout.piece_indices[index]]
    return [token for p in pieces for token in sequences[p.sequence][p.start : p.stop]]


def test_a_system_prompt_of_all_and_the_prompt_of_each_pair_are_shared_in_turn():
    first, second = [*START, *range(30, 50)], [*START, *range(60, 80)]
    sequences = [[*first, 1], [*first, 2], [*second, 1], [*second, 2]]

    layout = split_shared_prefixes(sequences)

    assert layout.num_tokens == 20 + 2 * (20 + 2)
    assert reported(layout, sequences, 3) == sequences[3]
    assert max(len(piece.before) for piece in layout.pieces) == 2


def test_a_few_common_tokens_are_not_worth_a_mask_over_long_ones():
    few = START[:MIN_SHARED]
    long = [[*few, *[index] * 400] for index in range(3)]
    short = [[*few, *[index] * 20] for index in range(3)]

    assert split_shared_prefixes(long).num_tokens == 3 * 408
    assert split_shared_prefixes(short).num_tokens == 8 + 3 * 20


@settings(max_examples=200)
@given(st.lists(st.lists(small, max_size=30), max_size=6), st.lists(small, max_size=20))
def test_the_pieces_of_a_sequence_are_the_sequence(rows, start):
    sequences = [start + row for row in rows]

    layout = split_shared_prefixes(sequences)

    assert [reported(layout, sequences, i) for i in range(len(sequences))] == sequences
    assert layout.num_tokens <= sum(map(len, sequences))
    for number, piece in enumerate(layout.pieces):
        assert piece.start < piece.stop
        assert all(earlier < number for earlier in piece.before)
        given_tokens = sum(layout.pieces[i].stop - layout.pieces[i].start for i in piece.before)
        assert given_tokens == piece.start


def test_what_begins_alike_is_packed_together():
    sequences = [[*START, 1, 2], [9, 9], [*START, 3], [9, 8, 7]]

    assert list(group_by_prefix(sequences, max_tokens=23)) == [[3, 1], [0, 2]]
    assert list(group_by_prefix(sequences, max_tokens=26)) == [[3, 1, 0], [2]]
    assert list(group_by_prefix(sequences, max_tokens=1)) == [[3], [1], [0], [2]]
    assert list(group_by_prefix([], max_tokens=5)) == []


def drawn(rng, count):
    """Sequences over two tokens, so that many begin alike."""
    return [[rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(count)]


def test_the_longest_common_beginning_is_found():
    rng = random.Random(0)
    for _ in range(300):
        held = drawn(rng, rng.randrange(1, 8))
        ids = drawn(rng, 1)[0]

        share = PrefixIndex(held).longest_shared(ids)

        assert share is not None
        assert share.num_tokens == common_prefix_length(held[share.index], ids)
        assert share.num_tokens == max(common_prefix_length(other, ids) for other in held)


def test_every_token_that_sequences_begin_with_alike_is_run_once():
    rng = random.Random(1)
    for _ in range(300):
        sequences = drawn(rng, rng.randrange(1, 9))
        shares = shared_prefixes(sequences)
        # All beginnings there are: the nodes of their tree.
        expected = {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}

        run = 0
        for ids, share in zip(sequences, shares, strict=True):
            run += len(ids) - (share.num_tokens if share else 0)
            if share:
                assert ids[: share.num_tokens] == sequences[share.index][: share.num_tokens]

        assert run == len(expected)


def test_nobody_waits_for_itself_and_no_longer_than_needed():
    system, tool = [7] * 5, [8] * 5
    sequences = [[*system, 1], [*system, *tool, 2], [*system, *tool, 3], [*system, 1], [9]]

    assert shared_prefixes(sequences) == [
        None,
        SharedPrefix(0, 5),
        SharedPrefix(1, 10),
        SharedPrefix(0, 6),
        None,
    ]

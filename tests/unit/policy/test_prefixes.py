import random

import pytest

from stillroom.models.sharing import num_common
from stillroom.policy.prefixes import PrefixIndex, SharedPrefix, shared_prefixes


@pytest.mark.parametrize(
    ("one", "other", "num"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 5, 3], [1, 2, 3], 1)],
)
def test_what_two_sequences_begin_with_alike_is_counted(one, other, num):
    assert num_common(one, other) == num_common(other, one) == num


def drawn(rng, count):
    """Sequences over two tokens, so that many begin alike."""
    return [[rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(count)]


def test_the_longest_common_beginning_is_found():
    rng = random.Random(0)
    for _ in range(300):
        held = drawn(rng, rng.randrange(1, 8))
        ids = drawn(rng, 1)[0]

        share = PrefixIndex(held).longest(ids)

        assert share is not None
        assert share.num_tokens == num_common(held[share.index], ids)
        assert share.num_tokens == max(num_common(other, ids) for other in held)


def test_nothing_is_found_where_nothing_is_held():
    assert PrefixIndex([]).longest([1, 2]) is None


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

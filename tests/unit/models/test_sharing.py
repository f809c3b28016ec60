from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.models.sharing import MIN_SHARED, lay_out, packs

START = list(range(100, 120))
small = st.integers(0, 2)
"""Few tokens, so that sequences often begin alike."""


def reported(layout, sequences, index):
    pieces = [layout.pieces[i] for i in layout.of_sequence[index]]
    return [token for p in pieces for token in sequences[p.holder][p.start : p.stop]]


def test_a_prompt_that_two_answers_share_is_one_piece():
    sequences = [[*START, 1, 2], [*START, 3]]

    layout = lay_out(sequences)

    assert layout.num_tokens == len(START) + 3
    assert [piece.before for piece in layout.pieces] == [(), (0,), (0,)]


def test_a_system_prompt_of_all_and_the_prompt_of_each_pair_are_shared_in_turn():
    first, second = [*START, *range(30, 50)], [*START, *range(60, 80)]
    sequences = [[*first, 1], [*first, 2], [*second, 1], [*second, 2]]

    layout = lay_out(sequences)

    assert layout.num_tokens == 20 + 2 * (20 + 2)
    assert reported(layout, sequences, 3) == sequences[3]
    assert max(len(piece.before) for piece in layout.pieces) == 2


def test_a_sequence_that_others_go_on_from_has_no_piece_of_its_own():
    sequences = [START, [*START, 1], [*START, 2]]

    layout = lay_out(sequences)

    assert layout.of_sequence[0] == (0,)
    assert layout.num_tokens == len(START) + 2


def test_a_few_common_tokens_are_not_worth_a_mask_over_long_ones():
    few = START[:MIN_SHARED]
    long = [[*few, *[index] * 400] for index in range(3)]
    short = [[*few, *[index] * 20] for index in range(3)]

    assert lay_out(long).num_tokens == 3 * 408
    assert lay_out(short).num_tokens == 8 + 3 * 20


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(small, max_size=30), max_size=6), st.lists(small, max_size=20))
def test_the_pieces_of_a_sequence_are_the_sequence(rows, start):
    sequences = [start + row for row in rows]

    layout = lay_out(sequences)

    assert [reported(layout, sequences, i) for i in range(len(sequences))] == sequences
    assert layout.num_tokens <= sum(map(len, sequences))
    for number, piece in enumerate(layout.pieces):
        assert piece.start < piece.stop
        assert all(earlier < number for earlier in piece.before)
        given_tokens = sum(layout.pieces[i].stop - layout.pieces[i].start for i in piece.before)
        assert given_tokens == piece.start


def test_what_begins_alike_is_packed_together():
    sequences = [[*START, 1, 2], [9, 9], [*START, 3], [9, 8, 7]]

    assert list(packs(sequences, max_tokens=23)) == [[3, 1], [0, 2]]
    assert list(packs(sequences, max_tokens=26)) == [[3, 1, 0], [2]]
    assert list(packs(sequences, max_tokens=1)) == [[3], [1], [0], [2]]
    assert list(packs([], max_tokens=5)) == []

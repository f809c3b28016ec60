"""The names of rows, and the set of hashes behind them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stillroom.data.row_names import HashSet, RowNames, is_row_name, matches_name, row_hash


def test_equal_rows_of_a_file_are_numbered_and_each_file_begins_anew() -> None:
    names = RowNames()
    one, other = row_hash(b"one"), row_hash(b"other")

    assert [names.name(Path("a"), data) for data in (b"one", b"other", b"one", b"one")] == [
        f"{one}#1", f"{other}#1", f"{one}#2", f"{one}#3",
    ]  # fmt: skip
    assert names.name(Path("b"), b"one") == f"{one}#1"


def test_a_row_is_known_by_its_name_its_hash_and_a_beginning_that_is_long_enough() -> None:
    name = f"{row_hash(b'one')}#12"

    assert is_row_name(name)
    assert all(matches_name(given, name) for given in (name, name[:16], name[:8]))
    assert not any(matches_name(given, name) for given in (name[:-1], name[:7], "", "None-None"))
    assert not is_row_name(name[:16])


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=3000))
def test_a_hash_is_new_only_once(values: list[int]) -> None:
    hashes, seen = HashSet(), set[int]()
    for value in values:
        # 0 marks a free slot, so it counts as 1.
        held = value or 1
        assert hashes.add(value) == (held not in seen)
        seen.add(held)

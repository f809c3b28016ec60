"""Finished rows, packed."""

from hypothesis import given
from hypothesis import strategies as st

from stillroom.rollout.journal.finished import FinishedRows
from stillroom.rollout.journal.records import FinishedRow, RolloutKey
from stillroom.types import Answerer, CallTotals, Usage

ANSWERERS = st.lists(
    st.builds(Answerer, model=st.sampled_from("ab"), fingerprint=st.none() | st.just("f")),
    max_size=2,
).map(tuple)
TOTALS = st.none() | st.builds(
    CallTotals,
    calls=st.integers(0, 9),
    cost_usd=st.none() | st.floats(0, 1),
    answered_by=ANSWERERS,
)
ROWS = st.builds(
    FinishedRow,
    task_id=st.integers(0, 5).map("{:016x}".format) | st.sampled_from(["ü", ""]),
    sample=st.integers(0, 2),
    reward=st.none() | st.floats(allow_nan=False),
    success=st.none() | st.booleans(),
    truncated=st.booleans(),
    turns=st.integers(0, 9),
    usage=st.builds(Usage, prompt_tokens=st.integers(0, 2**40)),
    cost_usd=st.none() | st.floats(0, 1),
    judge=TOTALS,
    dropped=TOTALS.filter(lambda totals: totals is None or not totals.answered_by),
    answered_by=ANSWERERS,
)


@given(st.lists(ROWS, max_size=40))
def test_rows_are_kept_as_a_dictionary_keeps_them(rows: list[FinishedRow]) -> None:
    packed, plain = FinishedRows(), dict[RolloutKey, FinishedRow]()
    for row in rows:
        packed.add(row)
        plain[RolloutKey(row.task_id, row.sample)] = row

    assert len(packed) == len(plain)
    assert dict(packed) == plain
    assert sorted(map(repr, packed.rows())) == sorted(map(repr, plain.values()))
    assert RolloutKey("missing", 0) not in packed
    assert packed.get(RolloutKey("missing", 0)) is None

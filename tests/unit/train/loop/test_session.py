import pytest

from fakes.conversations import answer, user
from stillroom.data.formats import DpoRow, SftRow
from stillroom.train.loop.rows import epoch_order, hold_out


def row(prompt: str, said: str = "12") -> SftRow:
    return SftRow(messages=[user(prompt), answer(said)], tools=[], metadata={})


@pytest.mark.parametrize(
    ("num", "share", "held_out"),
    [(10, 0.0, 0), (10, 0.2, 2), (10, 0.99, 9), (1, 0.5, 0), (3, 0.5, 2)],
)
def test_a_share_of_the_rows_is_held_out_and_one_is_always_left_to_train(num, share, held_out):
    rows = [row(f"prompt {index}") for index in range(num)]

    train, apart = hold_out(rows, share, seed=1)

    assert len(apart) == held_out
    assert [r for r in rows if r in train] == train
    assert [r for r in rows if r not in train] == apart
    assert hold_out(rows, share, seed=1) == (train, apart)


def test_pairs_of_the_same_prompt_stay_on_the_same_side():
    pairs = [
        DpoRow(
            prompt=[user(f"prompt {index % 5}")],
            chosen=[answer(f"answer {index}")],
            rejected=[answer("no")],
            tools=[],
        )
        for index in range(20)
    ]

    train, apart = hold_out(pairs, 0.4, seed=0)

    assert len(apart) == 8
    assert [pair for pair in pairs if pair in train] == train
    trained_on = {pair.prompt[0]["content"] for pair in train}
    assert trained_on.isdisjoint(pair.prompt[0]["content"] for pair in apart)
    assert hold_out(pairs, 0.0, seed=0) == (pairs, [])


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    first, second = epoch_order(20, 0, seed=1), epoch_order(20, 1, seed=1)

    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first == epoch_order(20, 0, seed=1)
    assert first != epoch_order(20, 0, seed=2)

import pytest

from stillroom.train.loop.session import batches_of, epoch_order


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    first, second = epoch_order(20, 0, seed=1), epoch_order(20, 1, seed=1)

    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first == epoch_order(20, 0, seed=1)
    assert first != epoch_order(20, 0, seed=2)


@pytest.mark.parametrize(
    ("size", "wanted"), [(2, [[4, 3], [2, 1], [0]]), (5, [[4, 3, 2, 1, 0]]), (9, [[4, 3, 2, 1, 0]])]
)
def test_batches_follow_the_order_and_the_last_may_be_smaller(size, wanted):
    assert batches_of([4, 3, 2, 1, 0], size) == wanted

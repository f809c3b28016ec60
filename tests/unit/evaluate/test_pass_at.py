import itertools

import pytest

from stillroom.evaluate.intervals import pass_at_k, pass_at_k_estimate


@pytest.mark.parametrize("num", [1, 4, 8])
def test_the_estimate_is_the_mean_over_all_choices_of_k_samples(num):
    for right, k in itertools.product(range(num + 1), range(1, num + 1)):
        samples = [True] * right + [False] * (num - right)
        choices = list(itertools.combinations(samples, k))
        exact = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(right, num, k) == pytest.approx(exact)


@pytest.mark.parametrize(("right", "num", "k"), [(1, 2, 3), (3, 2, 1), (0, 0, 1), (0, 2, 0)])
def test_too_few_samples_say_nothing(right, num, k):
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(right, num, k)


def answers(**successes):
    return [(task, letter == "y") for task, letters in successes.items() for letter in letters]


def test_a_task_is_passed_if_one_of_its_samples_is_right():
    found = pass_at_k_estimate(answers(a="nnny", b="nnnn", c="yyyy"), 4)

    assert found is not None
    assert (found.value, found.n) == (pytest.approx(2 / 3), 3)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 2 / 3 < found.high


def test_tasks_whose_rollouts_failed_count_neither_as_right_nor_as_wrong():
    found = pass_at_k_estimate(answers(a="ny", b="n"), 2)

    assert found is not None
    assert (found.value, found.n) == (1.0, 1)
    assert pass_at_k_estimate(answers(a="n"), 2) is None

import random

import msgspec
import pytest

from fakes.run_folders import evaluation_result
from stillroom.data.instruction import Instruction
from stillroom.errors import InputError
from stillroom.evaluate.compare import Comparison, compare
from stillroom.evaluate.files import Evaluation, TaskScore
from stillroom.evaluate.intervals import share_estimate


def evaluation(name: str, scores: dict[str, float], **groups: str) -> Evaluation:
    """An evaluation with the given success by task."""
    accuracy = share_estimate(round(sum(scores.values())), len(scores))
    result = evaluation_result(name, accuracy)
    tasks = [
        TaskScore(
            task_id=task_id,
            success=success,
            reward=success,
            groups={"level": groups.get(task_id, "easy")},
        )
        for task_id, success in scores.items()
    ]
    return Evaluation(result=result, tasks=tasks)


def compared(before: list[float], after: list[float], **groups: str) -> Comparison:
    names = [f"t{index}" for index in range(max(len(before), len(after)))]
    return compare(
        evaluation("base", dict(zip(names, before, strict=False)), **groups),
        evaluation("new", dict(zip(names, after, strict=False)), **groups),
    )


def test_a_comparison_is_made_task_by_task() -> None:
    result = compared([0, 0, 0, 1, 1], [1, 1, 0, 1, 0])

    assert (result.baseline, result.candidate) == ("base", "new")
    assert (result.baseline_accuracy, result.candidate_accuracy) == (0.4, 0.6)
    assert result.difference.value == pytest.approx(0.2)
    assert (result.tasks_won, result.tasks_lost, result.tasks_shared) == (2, 1, 5)
    assert result.p_value == 1.0
    assert not result.is_significant
    low, high = result.difference.low, result.difference.high
    assert low is not None
    assert high is not None
    assert low < 0
    assert high > 0.2


def test_only_shared_tasks_count() -> None:
    result = compared([0, 0, 1], [1, 0, 1, 1, 1])

    assert (result.tasks_shared, result.tasks_unshared) == (3, 2)
    assert (result.baseline_accuracy, result.candidate_accuracy) == (1 / 3, 2 / 3)


@pytest.mark.parametrize(("after", "shared"), [({"c": 1.0}, "only one task"), ({}, "no task")])
def test_fewer_than_two_shared_tasks_are_no_comparison(
    after: dict[str, float], shared: str
) -> None:
    before = evaluation("base", {"a": 0, "b": 0, "c": 1})
    new = evaluation("new", {**after, "z": 1.0})

    with pytest.raises(InputError) as caught:
        compare(before, new)
    assert f"'base' and 'new' have {shared} in common" in caught.value.problem


def test_a_clear_difference_is_significant_both_ways() -> None:
    worse, better = [0] * 20 + [1] * 10, [1] * 28 + [0] * 2

    for before, after, sign in ((worse, better, 1), (better, worse, -1)):
        result = compared(list(map(float, before)), list(map(float, after)))
        assert result.is_significant
        assert result.p_value < 0.001
        assert result.difference.value * sign == pytest.approx(0.6)


@pytest.mark.parametrize("num_tasks", [2, 3, 4, 5])
def test_a_handful_of_tasks_shows_nothing_however_alike_they_come_out(num_tasks: int) -> None:
    # All of five tasks won has a chance of 1 in 16 under no difference at all.
    result = compared([0.0] * num_tasks, [1.0] * num_tasks)

    assert result.p_value >= 0.0625
    assert not result.is_significant


def test_groups_of_more_than_one_task_are_compared_by_themselves() -> None:
    result = compared([0, 0, 0, 1, 0], [1, 1, 0, 0, 1], t2="hard", t3="hard", t4="odd")

    assert [(g.field, g.group, g.difference.value, g.difference.n) for g in result.by_group] == [
        ("level", "easy", 1.0, 2),
        ("level", "hard", -0.5, 2),
    ]


def test_two_models_that_are_alike_are_rarely_told_apart() -> None:
    chance = random.Random(20260801)
    found = 0
    for _ in range(400):
        before = [float(chance.random() < 0.6) for _ in range(40)]
        after = [float(chance.random() < 0.6) for _ in range(40)]
        found += compared(before, after).is_significant
    assert found / 400 <= 0.08


def test_a_comparison_says_what_each_of_the_two_read_before_the_prompts() -> None:
    before, after = (evaluation(name, {"a": 0, "b": 1}) for name in ("base", "new"))
    rules = Instruction("Add seven.", "# Prices\n\nIn euros.").describe()
    instructed = msgspec.structs.replace(after.result, instruction=rules)
    after = Evaluation(result=instructed, tasks=after.tasks)

    assert compare(before, before).prompts is None
    assert compare(after, after).prompts == f"Both read {rules}."
    assert compare(before, after).prompts == (
        "'base' read the prompts' own system messages; 'new' read the system message 'Add seven.', "
        "then '# Prices' … (19 characters)."
    )
    assert Instruction("").describe() == "no system message"


def test_a_field_that_no_task_has_makes_no_group() -> None:
    tasks = {"t0": "(none)", "t1": "(none)"}

    assert compared([0, 0], [1, 1], **tasks).by_group == []
    assert len(compared([0, 0, 0, 0], [1, 1, 0, 1], **tasks).by_group) == 2

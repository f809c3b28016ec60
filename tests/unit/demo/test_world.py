import re
from collections import Counter
from random import Random

import pytest

from demo_models.conversations import run_tool
from stillroom.demo.shop import TASK_TYPES, evaluate
from stillroom.demo.world import heldout_tasks, is_heldout, make_task, training_tasks

NUM_CALLS = {"easy": 1, "medium": 2, "hard": 3}


ANSWERS_BY_HAND = {
    "price_check": lambda item, _other, _numbers: item["price"],
    "stock_check": lambda item, _other, _numbers: item["stock"],
    "sum": lambda _item, _other, numbers: sum(numbers),
    "bulk": lambda item, _other, numbers: numbers[0] * item["price"],
    "change": lambda item, _other, numbers: numbers[0] - item["price"],
    "left": lambda item, _other, numbers: item["stock"] - numbers[0],
    "basket": lambda item, other, numbers: numbers[0] * item["price"] + numbers[1] * other["price"],
    "inventory": lambda item, _other, _numbers: item["stock"] * item["price"],
    "budget": lambda item, other, numbers: numbers[0] - numbers[1] * item["price"] - other["price"],
    "difference": lambda item, other, _numbers: item["price"] - other["price"],
}


def answer_by_hand(task):
    """What a person would answer, from the prompt's numbers and the price list in its order."""
    numbers = [int(digits) for digits in re.findall(r"\d+", task.prompt)]
    return ANSWERS_BY_HAND[task.task_type](*task.knowledge_base.values(), numbers)


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_gold_plan_leads_to_the_answer_a_person_would_give(task_type):
    rng = Random(task_type)
    for _ in range(200):
        task = make_task(rng, task_type)
        replies = [run_tool(task, call.tool, call.arguments) for call in task.gold_plan]

        assert replies[-1] == task.expected_answer == str(answer_by_hand(task))
        assert len(task.gold_plan) == NUM_CALLS[task.difficulty]
        assert int(task.expected_answer) > 0


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_prompt_names_what_the_plan_asks_for_and_only_that(task_type):
    rng = Random(task_type)
    for _ in range(100):
        task = make_task(rng, task_type)
        requested = {call.argument for call in task.gold_plan if call.tool != "calculator"}
        named = {item for item in task.knowledge_base if re.search(rf"\b{item}s?\b", task.prompt)}

        assert named == requested


def test_the_same_seed_gives_the_same_tasks():
    assert training_tasks(50, seed=7) == training_tasks(50, seed=7)
    assert training_tasks(50, seed=7) != training_tasks(50, seed=8)


@pytest.mark.thorough
def test_training_and_heldout_tasks_share_no_text():
    training, heldout = training_tasks(4000, seed=1), heldout_tasks(1000, seed=1)

    assert not {task.prompt for task in training} & {task.prompt for task in heldout}
    assert not any(is_heldout(task.prompt) for task in training)
    assert all(is_heldout(task.prompt) for task in heldout)


@pytest.mark.parametrize(("draw", "num"), [(training_tasks, 3000), (heldout_tasks, 600)])
def test_drawn_tasks_are_distinct_and_balanced_over_the_types(draw, num):
    tasks = draw(num, seed=3)

    assert len({(task.prompt, task.expected_answer) for task in tasks}) == num
    assert Counter(task.task_type for task in tasks) == dict.fromkeys(TASK_TYPES, num // 10)
    numbered = [task.prompt for task in tasks if re.search(r"\d", task.prompt)]
    assert len(set(numbered)) == len(numbered)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1+2*3", 7), ("(1+2)*3", 9), ("-4 + 1", -3), (" 2 * 3 ", 6), ("2--3", 5)],
)
def test_the_calculator_computes(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "2**3", "1/2", "5(3)", "()", "1+", "007+1", "1_0", "abs(1)", "+1", "1+" * 20 + "1", "1\n"],
)
def test_the_calculator_refuses_anything_else(expression):
    with pytest.raises(ValueError, match="bad expression"):
        evaluate(expression)


def test_the_calculator_refuses_a_large_result():
    with pytest.raises(ValueError, match="result too large"):
        evaluate("1000000000")

    assert evaluate("-999999999") == -999999999

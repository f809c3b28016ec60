"""The shop clerk's tasks: random questions, split into training and held-out tasks.

Each task has its own knowledge base of two items, so its answer can be looked up and computed, but
not memorised.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import TypedDict

from stillroom.demo.shop import (
    ITEMS,
    PARAMETER,
    TASK_PATTERNS,
    TASK_TYPES,
    Difficulty,
    KnowledgeBase,
    TaskType,
    ToolName,
    evaluate,
)
from stillroom.types import Message

SYSTEM = "You are a shop clerk. Use the tools."
_HELDOUT_PERCENT = 15


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One tool call of a plan to solve a task."""

    tool: ToolName
    argument: str

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments of the call by parameter name."""
        return {PARAMETER[self.tool]: self.argument}


@dataclass(frozen=True, slots=True)
class ShopTask:
    """One question to the clerk, with the data for answering it and judging answers."""

    task_type: TaskType
    difficulty: Difficulty
    prompt: str
    knowledge_base: KnowledgeBase
    expected_answer: str
    """The integer X that `The answer is X.` must state."""
    gold_plan: tuple[PlannedCall, ...]
    """The shortest series of calls that solves the task; the reply to the last is the answer."""


class _TaskMetadata(TypedDict):
    """The metadata of a task, which tools and rewards may read."""

    task_type: str
    difficulty: str
    kb: KnowledgeBase
    expected_answer: str


class _TaskRow(TypedDict):
    """One line of a project's prompt file."""

    messages: list[Message]
    tools: list[str]
    rewards: list[str]
    metadata: _TaskMetadata


def make_task(rng: Random, task_type: TaskType) -> ShopTask:
    """Returns a random task of this type, from either split."""
    pattern = TASK_PATTERNS[task_type]
    item, other = rng.sample(ITEMS, 2)
    numbers = _draw_numbers(rng, task_type)
    look_up_calls = {
        "price": PlannedCall("price", item),
        "other_price": PlannedCall("price", other),
        "stock": PlannedCall("stock", item),
    }
    gold_plan = tuple(look_up_calls[name] for name in pattern.look_ups)
    if pattern.expression is None:
        answer = numbers[pattern.look_ups[-1]]
    else:
        expression = pattern.expression.format(**numbers)
        gold_plan += (PlannedCall("calculator", expression),)
        answer = evaluate(expression)
    return ShopTask(
        task_type=task_type,
        difficulty=pattern.difficulty,
        prompt=rng.choice(pattern.wordings).format(item=item, other=other, **numbers),
        knowledge_base={
            item: {"price": numbers["price"], "stock": numbers["stock"]},
            other: {"price": numbers["other_price"], "stock": numbers["other_stock"]},
        },
        expected_answer=str(answer),
        gold_plan=gold_plan,
    )


def is_heldout(prompt: str) -> bool:
    """Returns whether a task is held out, which depends only on its text."""
    digest = hashlib.sha256(prompt.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELDOUT_PERCENT


def training_tasks(num: int, *, seed: int) -> list[ShopTask]:
    """Returns distinct tasks of the training split, balanced over the task types."""
    return list(islice(_distinct_tasks(Random(seed), heldout=False), num))


def heldout_tasks(num: int, *, seed: int) -> list[ShopTask]:
    """Returns distinct held-out tasks, balanced over the task types."""
    return list(islice(_distinct_tasks(Random(seed), heldout=True), num))


def task_row(task: ShopTask) -> _TaskRow:
    """Returns the task as a line of a project's prompt file."""
    return {
        "messages": opening(task),
        "tools": list(PARAMETER),
        "rewards": ["correct_answer"],
        "metadata": {
            "task_type": task.task_type,
            "difficulty": task.difficulty,
            "kb": task.knowledge_base,
            "expected_answer": task.expected_answer,
        },
    }


def opening(task: ShopTask) -> list[Message]:
    """Returns the messages with which every conversation about the task begins."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]


def _draw_numbers(rng: Random, task_type: TaskType) -> dict[str, int]:
    """Returns all numbers of a task, by the names of their placeholders."""
    price, other_price = rng.sample(range(3, 400), 2)
    if task_type == "difference":
        price, other_price = max(price, other_price), min(price, other_price)
    n = rng.randint(2, 29)
    spent = n * price + other_price if task_type == "budget" else price
    return {
        "price": price,
        "other_price": other_price,
        "stock": n + rng.randint(1, 170) if task_type == "left" else rng.randint(2, 199),
        "other_stock": rng.randint(2, 199),
        "n": n,
        "k": rng.randint(2, 29),
        "x": rng.randint(11, 989),
        "y": rng.randint(11, 989),
        "coins": spent + rng.randint(1, 400),
    }


def _distinct_tasks(rng: Random, *, heldout: bool) -> Iterator[ShopTask]:
    """Yields distinct tasks of one split endlessly, cycling through the task types."""
    seen: set[tuple[str, str]] = set()
    for task_type in cycle(TASK_TYPES):
        task = make_task(rng, task_type)
        while is_heldout(task.prompt) != heldout or _identity(task) in seen:
            task = make_task(rng, task_type)
        seen.add(_identity(task))
        yield task


def _identity(task: ShopTask) -> tuple[str, str]:
    """Returns a key that equal tasks share: the text, and the answer if the text has no number.

    There are few texts without numbers (items times wordings), so tasks with such a text may differ
    only in their answer, which depends on the knowledge base.
    """
    return (task.prompt, "" if re.search(r"\d", task.prompt) else task.expected_answer)

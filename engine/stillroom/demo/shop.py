"""The shop clerk's task types and questions, its three tools, and its items."""

import ast
import re
from dataclasses import dataclass
from typing import Literal, get_args

ToolName = Literal["price", "stock", "calculator"]
KnowledgeBase = dict[str, dict[str, int]]
"""The shop's data: the "price" in coins and the "stock" of each item, by item name."""

PARAMETER: dict[ToolName, str] = {"price": "item", "stock": "item", "calculator": "expression"}
"""The name of each tool's parameter."""


def evaluate(expression: str) -> int:
    """Returns the value of an expression of digits, `+ - * ( )` and spaces.

    Raises ValueError for other characters, for more than 40, or if the absolute value is 10**9
    or more.
    """
    if not re.fullmatch(r"[0-9+\-*() ]{1,40}", expression):
        raise ValueError("bad expression")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("bad expression") from None
    if abs(value) >= 10**9:
        raise ValueError("result too large")
    return value


def _value(node: ast.expr) -> int:
    """Returns the value of a parsed expression. Raises ValueError for anything but arithmetic."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case _:
            raise ValueError("bad expression")


Difficulty = Literal["easy", "medium", "hard"]
TaskType = Literal[
    "price_check",
    "stock_check",
    "sum",
    "bulk",
    "change",
    "left",
    "basket",
    "inventory",
    "budget",
    "difference",
]
_LookUp = Literal["price", "other_price", "stock"]
TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)

# fmt: off
ITEMS = (
    "lamp", "chair", "table", "clock", "radio", "kettle", "blanket", "mirror", "basket", "bucket",
    "ladder", "hammer", "saw", "drill", "broom", "pillow", "carpet", "candle", "bottle", "teapot",
    "bowl", "spoon", "fork", "ladle", "plate", "cup", "jug", "tray", "shovel", "stool", "sofa",
    "desk", "rug", "vase", "frame", "fan", "heater", "lantern", "rope", "tent", "kite", "drum",
    "flute", "guitar", "violin", "puzzle", "globe", "notebook", "pencil", "marker", "ruler",
    "stapler", "folder",
)
# fmt: on
"""The items of the shop. None starts with a vowel and all form the plural with -s, so that they fit
all wordings."""


@dataclass(frozen=True, slots=True)
class TaskPattern:
    """A task type; names in braces are placeholders for the task's numbers and items."""

    difficulty: Difficulty
    """The difficulty by number of tool calls: easy 1, medium 2, hard 3."""
    wordings: tuple[str, str, str]
    look_ups: tuple[_LookUp, ...]
    expression: str | None
    """The calculator's input; None if the result of the look-up is the answer."""


TASK_PATTERNS: dict[TaskType, TaskPattern] = {
    "price_check": TaskPattern(
        "easy",
        ("How much is a {item}?", "What does a {item} cost?", "Tell me the price of a {item}."),
        ("price",),
        None,
    ),
    "stock_check": TaskPattern(
        "easy",
        (
            "How many {item}s are in stock?",
            "How many {item}s do you have?",
            "Count the {item}s on the shelf.",
        ),
        ("stock",),
        None,
    ),
    "sum": TaskPattern(
        "easy",
        (
            "What is {x} plus {y}?",
            "Add {x} and {y}.",
            "I sold {x} tickets today and {y} yesterday. How many in total?",
        ),
        (),
        "{x}+{y}",
    ),
    "bulk": TaskPattern(
        "medium",
        (
            "How much do {n} {item}s cost?",
            "What is the price of {n} {item}s?",
            "I want {n} {item}s. How much do I pay?",
        ),
        ("price",),
        "{n}*{price}",
    ),
    "change": TaskPattern(
        "medium",
        (
            "I pay for a {item} with {coins} coins. How much change do I get?",
            "I have {coins} coins and buy a {item}. How much is left?",
            "{coins} coins minus the price of a {item} is how much?",
        ),
        ("price",),
        "{coins}-{price}",
    ),
    "left": TaskPattern(
        "medium",
        (
            "I buy {n} {item}s. How many {item}s are left in stock?",
            "How many {item}s are left if I buy {n}?",
            "{n} {item}s are sold. How many do you have left?",
        ),
        ("stock",),
        "{stock}-{n}",
    ),
    "basket": TaskPattern(
        "hard",
        (
            "How much do {n} {item}s and {k} {other}s cost together?",
            "I buy {n} {item}s and {k} {other}s. What is the total?",
            "Total price of {n} {item}s plus {k} {other}s?",
        ),
        ("price", "other_price"),
        "{n}*{price}+{k}*{other_price}",
    ),
    "inventory": TaskPattern(
        "hard",
        (
            "What are all the {item}s in stock worth?",
            "What is the total value of the {item}s you have?",
            "If you sold all your {item}s, how much would you earn?",
        ),
        ("price", "stock"),
        "{stock}*{price}",
    ),
    "budget": TaskPattern(
        "hard",
        (
            "I have {coins} coins. I buy {n} {item}s and a {other}. How much is left?",
            "From {coins} coins I pay for {n} {item}s and a {other}. What remains?",
            "I pay {coins} coins for {n} {item}s and a {other}. How much change do I get?",
        ),
        ("price", "other_price"),
        "{coins}-{n}*{price}-{other_price}",
    ),
    "difference": TaskPattern(
        "hard",
        (
            "How much more does a {item} cost than a {other}?",
            "What is the price of a {item} minus the price of a {other}?",
            "I sell a {item} and buy a {other}. How many coins do I get?",
        ),
        ("price", "other_price"),
        "{price}-{other_price}",
    ),
}

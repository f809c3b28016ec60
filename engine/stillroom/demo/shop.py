"""The clerk's three tools, the data that two of them look up, and the calculator."""

import ast
import re
from typing import Literal

ToolName = Literal["price", "stock", "calculator"]
KnowledgeBase = dict[str, dict[str, int]]
"""The type of the shop's data: each item's "price" in coins and "stock", by the item's name."""

PARAMETER: dict[ToolName, str] = {"price": "item", "stock": "item", "calculator": "expression"}
"""The name of the single parameter of each tool."""


def evaluate(expression: str) -> int:
    """Returns the value of an expression of digits, `+ - * ( )` and blanks.

    Raises ValueError if it is anything else or over 40 characters, or if the value is not between
    -10**9 and 10**9.
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

"""The shop clerk's tools: two look-ups in the task's own price list, and a calculator."""

import ast
import re

from stillroom.tools import ToolArgs, tool


@tool
def price(item: str, args: ToolArgs) -> int:
    """Price of one item in coins."""
    return look_up(item, "price", args)


@tool
def stock(item: str, args: ToolArgs) -> int:
    """How many of the item are in stock."""
    return look_up(item, "stock", args)


@tool
def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression of whole numbers, + - * and parentheses."""
    if not re.fullmatch(r"[0-9+\-*() ]{1,40}", expression):
        raise ValueError("bad expression")
    try:
        value = compute(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("bad expression") from None
    if abs(value) >= 10**9:
        raise ValueError("result too large")
    return value


def look_up(item: str, column: str, args: ToolArgs) -> int:
    """Returns one number from the price list in the task's metadata."""
    price_list = args.metadata["kb"]
    if item not in price_list:
        raise ValueError("unknown item")
    return price_list[item][column]


def compute(node: ast.expr) -> int:
    """Returns the value of a parsed expression. `eval` would allow more than arithmetic."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -compute(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return compute(left) + compute(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return compute(left) - compute(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return compute(left) * compute(right)
        case _:
            raise ValueError("bad expression")

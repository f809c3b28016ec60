"""The current tools of the shop's app: two look-ups in the price list, and a calculator."""

import ast
import re

from stillroom.tools import tool

# fmt: off
SHOP = {
    "lamp": (373, 100), "chair": (354, 91), "table": (395, 88), "clock": (80, 178), "radio":
    (136, 92), "kettle": (348, 46), "blanket": (328, 35), "mirror": (54, 197), "basket": (170,
    190), "bucket": (296, 108), "ladder": (89, 103), "hammer": (16, 67), "saw": (213, 197),
    "drill": (211, 117), "broom": (41, 185), "pillow": (55, 146), "carpet": (67, 71), "candle":
    (166, 195), "bottle": (245, 102), "teapot": (300, 174), "bowl": (233, 142), "spoon": (109,
    72), "fork": (105, 74), "ladle": (165, 135), "plate": (323, 62), "cup": (351, 64), "jug":
    (174, 180), "tray": (171, 141), "shovel": (221, 120), "stool": (50, 89), "sofa": (324, 61),
    "desk": (268, 187), "rug": (254, 45), "vase": (210, 164), "frame": (44, 81), "fan": (108,
    143), "heater": (127, 76), "lantern": (20, 76), "rope": (106, 52), "tent": (51, 61), "kite":
    (45, 107), "drum": (100, 32), "flute": (132, 198), "guitar": (358, 112), "violin": (394,
    134), "puzzle": (148, 149), "globe": (159, 167), "notebook": (356, 45), "pencil": (134, 74),
    "marker": (86, 62), "ruler": (322, 148), "stapler": (63, 174), "folder": (14, 117),
}
# fmt: on


@tool
def price(item: str) -> int:
    """Price of one item in coins."""
    return look_up(item)[0]


@tool
def stock(item: str) -> int:
    """How many of the item are in stock."""
    return look_up(item)[1]


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


def look_up(item: str) -> tuple[int, int]:
    """Returns the price and the stock of an item."""
    if item not in SHOP:
        raise ValueError("unknown item")
    return SHOP[item]


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

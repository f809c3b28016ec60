"""Conversations about the shop clerk's tasks, with real tool replies, to train models on."""

import json
import re
from collections.abc import Mapping, Sequence
from random import Random

from stillroom.demo.shop import PARAMETER, KnowledgeBase, TaskType, ToolName, evaluate
from stillroom.demo.world import PlannedCall, ShopTask, is_heldout, make_task, opening
from stillroom.types import Message, ToolCall, ToolSchema

TOOL_SCHEMAS: list[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
            },
        },
    }
    for name, parameter in PARAMETER.items()
]
"""The schemas for the chat template, which shows only names and parameters."""

_MAX_OPERAND_DIGITS = 4


def call_tool(knowledge_base: KnowledgeBase, name: str, arguments: Mapping[str, object]) -> int:
    """Returns a tool's result. Raises ValueError with a text for the model if the call is wrong."""
    match name, dict(arguments):
        case (("price" | "stock"), {"item": str(item), **rest}) if not rest:
            if item not in knowledge_base:
                raise ValueError("unknown item")
            return knowledge_base[item][name]
        case "calculator", {"expression": str(expression), **rest} if not rest:
            return evaluate(expression)
        case (("price" | "stock" | "calculator"), _):
            raise ValueError("bad arguments")
        case _:
            raise ValueError("unknown tool")


def make_training_task(rng: Random, task_type: TaskType) -> ShopTask:
    """Returns a random task of this type from the training split."""
    task = make_task(rng, task_type)
    while is_heldout(task.prompt):
        task = make_task(rng, task_type)
    return task


def run_tool(task: ShopTask, name: str, arguments: Mapping[str, object]) -> str:
    """Returns a call's reply for the model: a number, or `error: ` and the fault of the call."""
    try:
        return str(call_tool(task.knowledge_base, name, arguments))
    except ValueError as problem:
        return f"error: {problem}"


def is_correct(text: str, expected_answer: str) -> bool:
    """Returns whether the text states exactly one answer, and it is the expected one."""
    return re.findall(r"The answer is (-?\d+)\.", text) == [expected_answer]


def gold_messages(task: ShopTask) -> list[Message]:
    """Returns the whole conversation in which the clerk follows the gold plan."""
    return _conversation(task, task.gold_plan, task.expected_answer)


def noisy_messages(task: ShopTask, rng: Random) -> list[Message]:
    """Returns a conversation in the right format, with real replies, that follows a random plan.

    Its items and numbers are all copied from earlier messages, so that it teaches the format and
    copying, but not how to solve the task.
    """
    items = [item for item in task.knowledge_base if re.search(rf"\b{item}s?\b", task.prompt)]
    numbers = re.findall(r"\d+", task.prompt)
    plan: list[PlannedCall] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        call = _random_call(rng, items, numbers)
        plan.append(call)
        numbers += re.findall(r"\d+", run_tool(task, call.tool, call.arguments))
    answer = numbers[-1] if rng.random() < 0.8 else rng.choice(numbers)
    return _conversation(task, plan, answer)


def _conversation(task: ShopTask, plan: Sequence[PlannedCall], answer: str) -> list[Message]:
    messages = opening(task)
    for index, call in enumerate(plan, start=1):
        tool_call = _tool_call(call, call_id=f"call_{index}")
        messages.append({"role": "assistant", "content": "", "tool_calls": [tool_call]})
        messages.append(
            {
                "role": "tool",
                "tool_call_id": tool_call["id"],
                "name": call.tool,
                "content": run_tool(task, call.tool, call.arguments),
            }
        )
    messages.append({"role": "assistant", "content": f"The answer is {answer}."})
    return messages


def _tool_call(call: PlannedCall, *, call_id: str) -> ToolCall:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
    }


def _random_call(rng: Random, items: Sequence[str], numbers: Sequence[str]) -> PlannedCall:
    look_ups: Sequence[ToolName] = ("price", "stock") if items else ()
    operands = [number for number in numbers if len(number) <= _MAX_OPERAND_DIGITS]
    computations: Sequence[ToolName] = ("calculator",) if operands else ()
    tool = rng.choice((*look_ups, *computations))
    if tool != "calculator":
        return PlannedCall(tool, rng.choice(items))
    expression = rng.choice(operands)
    for _ in range(rng.choice((1, 1, 2))):
        expression += rng.choice("+-*") + rng.choice(operands)
    return PlannedCall(tool, expression)

"""Conversations and tools for tests of rendering, sampling and training."""

from typing import Any

from stillroom.types import Message, ToolSchema

Row = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def answer(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calls(*made: tuple[str, str], text: str = "", first: int = 0) -> Message:
    """An assistant message with tool calls, each a name and its arguments as JSON text."""
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {
                "id": call_id(index),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(made, start=first)
        ],
    }


def call_id(index: int) -> str:
    return f"call{index:05d}"


def reply(text: str, index: int = 0, name: str = "price") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id(index), "name": name}


PRICE: ToolSchema = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}
LAMP = ("price", '{"item": "lamp"}')
CHAIR = ("price", '{"item": "chair"}')

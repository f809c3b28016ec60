"""The conversation of the trace samples: what the scripted endpoint says, and what must come back.

Three calls: one with reasoning and two parallel tool calls, one with their results, and one with an
image, whose reply the limit of tokens cuts off.
"""

import json
from typing import Any

from trace_samples.scripted_endpoint import Call, Json, Reply

MODEL = "scripted-1"
SYSTEM = "You help in a shop. Use the tools."
FIRST = "What does the lamp cost, and how many are left?"
SECOND = "Is this the same lamp? ☂"
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)
CALLS = (
    Call("call_p1", "price", {"item": "lamp"}),
    Call("call_s1", "stock", {"item": "lamp", "shop": "Åbo"}),
)
RESULTS = ('{"price": 12}', "3")
REPLIES = (
    Reply(
        text="Let me look.",
        reasoning="Two things are needed.",
        calls=CALLS,
        prompt_tokens=50,
        cached_tokens=16,
        completion_tokens=21,
    ),
    Reply(text="The lamp costs 12 €; 3 are left.", prompt_tokens=90, completion_tokens=14),
    Reply(text="It looks", prompt_tokens=130, completion_tokens=2, is_cut=True),
)
_ITEM: Json = {"type": "string", "description": "The item's name."}
PARAMETERS: dict[str, Json] = {
    "price": {"type": "object", "properties": {"item": _ITEM}, "required": ["item"]},
    "stock": {
        "type": "object",
        "properties": {"item": _ITEM, "shop": {"type": "string"}},
        "required": ["item"],
    },
}
DESCRIPTIONS = {"price": "Returns an item's price.", "stock": "Returns how many are left."}


def tool_schemas() -> list[Json]:
    """Returns the tools in the shape of chat completions, which is ours."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": DESCRIPTIONS[name],
                "parameters": PARAMETERS[name],
            },
        }
        for name in PARAMETERS
    ]


def expected_messages(*, keeps_reasoning: bool, keeps_ids: bool = True) -> list[list[Json]]:
    """Returns the messages of each call in our shape, its reply last.

    Clients of chat completions send no reasoning back, so later calls lack it there. Without
    `keeps_ids`, the tool calls and their results have no ids.
    """
    calls = [
        ({"id": call.id} if keeps_ids else {})
        | {
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in CALLS
    ]
    reply: Json = {"role": "assistant", "content": REPLIES[0].text, "tool_calls": calls}
    thinking = reply | {"reasoning_content": REPLIES[0].reasoning}
    results: list[Json] = [
        {"role": "tool", "content": result} | ({"tool_call_id": call.id} if keeps_ids else {})
        for call, result in zip(CALLS, RESULTS, strict=True)
    ]
    question: list[Json] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": FIRST},
    ]
    second = [*question, thinking if keeps_reasoning else reply, *results]
    answer: Json = {"role": "assistant", "content": REPLIES[1].text}
    third = [*second, answer, {"role": "user", "content": SECOND}]
    return [
        [*question, thinking],
        [*second, answer],
        [*third, {"role": "assistant", "content": REPLIES[2].text}],
    ]


def compared(message: dict[str, Any]) -> Json:
    """Returns a message with the arguments of its calls as values, as spaces in them may differ."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    read = [
        call
        | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in calls
    ]
    return message | {"tool_calls": read}

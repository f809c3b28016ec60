"""Has the official clients hold the samples' conversation with a scripted endpoint.

Each function makes the three calls, or the first of them, as an application would, and returns what
a log of the application would hold: the arguments of each call and the reply that the client
returned.
"""

import json
from typing import Any

from trace_samples.conversation import (
    CALLS,
    DESCRIPTIONS,
    FIRST,
    IMAGE,
    MODEL,
    PARAMETERS,
    RESULTS,
    SECOND,
    SYSTEM,
    tool_schemas,
)
from trace_samples.scripted_endpoint import Json

MAX_TOKENS = 512
_DATA_URL = f"data:image/png;base64,{IMAGE}"


def chat(client: Any, *, is_streamed: bool = False, **more: Any) -> list[tuple[Json, Any]]:
    """Holds the conversation through chat completions; `client` is one of openai's."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": FIRST},
    ]
    calls: list[tuple[Json, Any]] = []

    def call() -> Any:
        request: Json = {"model": MODEL, "messages": [*messages], "tools": tool_schemas()}
        if is_streamed:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(client.chat.completions.create(**request, **options, **more))
            calls.append((request, chunks))
            return None
        completion = client.chat.completions.create(**request, **more)
        calls.append((request, completion))
        return completion

    call()
    messages.append(
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in CALLS
            ],
        }
    )
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(CALLS, RESULTS, strict=True)
    ]
    call()
    messages.append({"role": "assistant", "content": "The lamp costs 12 €; 3 are left."})
    image = {"type": "image_url", "image_url": {"url": _DATA_URL}}
    messages.append({"role": "user", "content": [{"type": "text", "text": SECOND}, image]})
    call()
    return calls


def responses(
    client: Any, *, is_chained: bool, is_streamed: bool = False, num_calls: int = 3, **more: Any
) -> list[tuple[Json, Any]]:
    """Holds the conversation through the Responses API.

    Chained, each call names the one before it and sends only what is new.
    """
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in tool_schemas()]
    image = {"type": "input_image", "detail": "auto", "image_url": _DATA_URL}
    new: list[list[Json]] = [
        [{"role": "user", "content": FIRST}],
        [
            {"type": "function_call_output", "call_id": call.id, "output": result}
            for call, result in zip(CALLS, RESULTS, strict=True)
        ],
        [{"role": "user", "content": [{"type": "input_text", "text": SECOND}, image]}],
    ]
    history: list[Any] = []
    calls: list[tuple[Json, Any]] = []
    for items in new[:num_calls]:
        request: Json = {"model": MODEL, "instructions": SYSTEM, "tools": tools}
        if is_chained:
            request |= {"input": items}
            if calls:
                request["previous_response_id"] = calls[-1][1].id
        else:
            history += items
            request |= {"input": [*history], "store": False}
        if is_streamed:
            *_, last = client.responses.create(**request, stream=True, **more)
            response = last.response
        else:
            response = client.responses.create(**request, **more)
        history += [item.model_dump(mode="json", exclude_none=True) for item in response.output]
        calls.append((request, response))
    return calls


def messages(
    client: Any, *, is_streamed: bool = False, num_calls: int = 3, **more: Any
) -> list[tuple[Json, Any]]:
    """Holds the conversation through Anthropic's Messages; `client` is one of anthropic's."""
    tools = [
        {"name": name, "description": DESCRIPTIONS[name], "input_schema": PARAMETERS[name]}
        for name in PARAMETERS
    ]
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    new: list[Any] = [
        FIRST,
        [
            {"type": "tool_result", "tool_use_id": call.id, "content": result}
            for call, result in zip(CALLS, RESULTS, strict=True)
        ],
        [{"type": "text", "text": SECOND}, {"type": "image", "source": source}],
    ]
    history: list[Json] = []
    calls: list[tuple[Json, Any]] = []
    for content in new[:num_calls]:
        history.append({"role": "user", "content": content})
        request: Json = {
            "model": MODEL,
            "max_tokens": MAX_TOKENS,
            "system": SYSTEM,
            "messages": [*history],
            "tools": tools,
        }
        if is_streamed:
            with client.messages.stream(**request, **more) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**request, **more)
        calls.append((request, reply))
        blocks = [block.model_dump(mode="json", exclude_none=True) for block in reply.content]
        history.append({"role": "assistant", "content": blocks})
    return calls

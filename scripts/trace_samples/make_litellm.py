"""Writes the samples of LiteLLM with LiteLLM itself.

`PYTHONPATH=scripts python -m trace_samples.make_litellm openai`, and the same with anthropic; needs
litellm and mcp. Each row is the payload
that LiteLLM hands its loggers, such as those that write to a bucket.
"""

import asyncio
import json
import os
import sys
from typing import Any

from trace_samples.conversation import (
    CALLS,
    FIRST,
    IMAGE,
    REPLIES,
    RESULTS,
    SECOND,
    SYSTEM,
    tool_schemas,
)
from trace_samples.files import KEY, write_rows
from trace_samples.scripted_endpoint import Json, ScriptedEndpoint, in_order

_SHOWN_ELSEWHERE = ("model_map_information", "hidden_params", "api_base", "requester_ip_address")
"""Fields that say nothing of the call, and much of the machine or of prices."""


async def _converse(model: str, address: str, *, is_streamed: bool) -> list[Json]:
    """Holds the conversation and returns the payloads that LiteLLM logged."""
    import litellm
    from litellm.integrations.custom_logger import CustomLogger

    logged: list[Json] = []

    class Logger(CustomLogger):
        """Keeps the payload of each call."""

        async def async_log_success_event(  # LiteLLM passes them by these names
            self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
        ) -> None:
            """Takes the payload of a call that was answered."""
            logged.append(json.loads(json.dumps(kwargs["standard_logging_object"], default=str)))

    litellm.callbacks = [Logger()]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": FIRST},
    ]

    async def call() -> None:
        reply: Any = await litellm.acompletion(
            model=model,
            messages=[*messages],
            tools=tool_schemas(),
            api_base=address,
            api_key=KEY,
            stream=is_streamed,
            max_tokens=512,
            metadata={"session_id": "shop-1", "tags": ["a"]},
            **({"stream_options": {"include_usage": True}} if is_streamed else {}),
        )
        if is_streamed:
            async for _ in reply:
                pass

    await call()
    made = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in CALLS
    ]
    messages.append({"role": "assistant", "content": REPLIES[0].text, "tool_calls": made})
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(CALLS, RESULTS, strict=True)
    ]
    await call()
    messages.append({"role": "assistant", "content": REPLIES[1].text})
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    messages.append({"role": "user", "content": [{"type": "text", "text": SECOND}, image]})
    await call()
    for _ in range(200):
        if len(logged) == len(REPLIES):
            break
        await asyncio.sleep(0.05)
    assert len(logged) == len(REPLIES)  # noqa: S101 - the sample would lack a call
    return sorted(logged, key=lambda row: row["startTime"])


def _tidy(row: Json) -> Json:
    row = {k: v for k, v in row.items() if k not in _SHOWN_ELSEWHERE and v is not None}
    row["metadata"] = {key: value for key, value in row["metadata"].items() if value}
    row.get("response_cost_failure_debug_info", {}).pop("traceback_str", None)
    text = json.dumps(row)
    is_clean = "127.0.0.1" not in text and "site-packages" not in text
    assert is_clean  # noqa: S101 - the sample would tell of this machine
    return row


KINDS = {
    "openai": ("openai/scripted-1", "/v1", False),
    "anthropic": ("anthropic/scripted-1", "", True),
}


def main(name: str) -> None:
    """Writes one sample."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    model, path, is_streamed = KINDS[name]
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        rows = asyncio.run(_converse(model, endpoint.url + path, is_streamed=is_streamed))
    write_rows(f"litellm/{name}.jsonl", [_tidy(row) for row in rows])


if __name__ == "__main__":
    main(sys.argv[1])

"""Has an agent of OpenAI's Agents SDK call a scripted endpoint, and keeps its traces.

`PYTHONPATH=scripts python -m trace_samples.make_openai_agents`; needs openai-agents. The agent runs
once through the Responses API and once through chat completions, and hands over to another agent;
its traces are written by a processor as `docs/traces.md` shows it.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_trace_processors,
)
from agents.tracing import TracingProcessor
from openai import AsyncOpenAI

from trace_samples.conversation import IMAGE, MODEL, REPLIES, RESULTS, SYSTEM
from trace_samples.scripted_endpoint import Call, Json, Reply, ScriptedEndpoint
from trace_samples.seen import SAMPLES, chat_call, responses_call, write_seen

_FOLDER = SAMPLES / "openai_agents"


class _Lines(TracingProcessor):
    """Writes each trace and span as a line, with what was sent and answered."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def _write(self, row: Any) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def on_trace_start(self, trace: Any) -> None:
        self._write(trace.export())

    def on_trace_end(self, trace: Any) -> None:
        pass

    def on_span_start(self, span: Any) -> None:
        pass

    def on_span_end(self, span: Any) -> None:
        row, data = span.export(), span.span_data
        if data.type == "response" and data.response is not None:
            row["span_data"]["input"] = data.input
            row["span_data"]["response"] = data.response.model_dump(mode="json")
        self._write(row)

    def shutdown(self) -> None:
        self._file.close()

    def force_flush(self) -> None:
        self._file.flush()


@function_tool
def price(item: str) -> str:
    """Returns an item's price."""
    return RESULTS[0]


@function_tool
def stock(item: str, shop: str) -> str:
    """Returns how many are left."""
    return RESULTS[1]


def _script(_path: str, body: Json) -> Reply:
    items = body.get("messages", body.get("input"))
    is_expert = "expert" in json.dumps(body.get("instructions") or items[0])
    last = items[-1]
    is_result = last.get("role") == "tool" or last.get("type") == "function_call_output"
    if is_expert:
        return Reply(text="It is from 1962.", prompt_tokens=70, completion_tokens=6)
    if is_result:
        call = Call("call_h", "transfer_to_expert", {})
        return Reply(calls=(call,), prompt_tokens=90, completion_tokens=5)
    return REPLIES[0]


async def _run(model: Any) -> None:
    expert = Agent(name="expert", instructions="You are an expert.", model=model)
    shop = Agent(
        name="shop", instructions=SYSTEM, model=model, tools=[price, stock], handoffs=[expert]
    )
    image = {
        "type": "input_image",
        "detail": "auto",
        "image_url": f"data:image/png;base64,{IMAGE}",
    }
    question = {"type": "input_text", "text": "What of this lamp?"}
    await Runner.run(shop, [{"role": "user", "content": [question, image]}])


def main() -> None:
    """Writes the traces of both APIs and what the endpoint saw."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    for name, model, view in (
        ("responses", OpenAIResponsesModel, responses_call),
        ("chat", OpenAIChatCompletionsModel, chat_call),
    ):
        set_trace_processors([_Lines(_FOLDER / f"{name}.jsonl")])
        with ScriptedEndpoint(_script) as endpoint:
            client = AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none")
            asyncio.run(_run(model(model=MODEL, openai_client=client)))
        write_seen(_FOLDER / f"{name}.seen.json", [view(seen) for seen in endpoint.seen])


if __name__ == "__main__":
    main()

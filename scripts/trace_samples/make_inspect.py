"""Has inspect_ai evaluate a scripted endpoint, and keeps its logs in both of its formats.

`PYTHONPATH=scripts python -m trace_samples.make_inspect`; needs inspect_ai and openai. One sample
has reasoning, parallel tool calls and an image, one is answered at once, and in one a tool fails.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval  # noqa: A004 - inspect_ai's name
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, ToolError, tool

from trace_samples.conversation import CALLS, IMAGE, MODEL, REPLIES, RESULTS, SYSTEM
from trace_samples.scripted_endpoint import Json, Reply, ScriptedEndpoint
from trace_samples.seen import SAMPLES, chat_call, responses_call, write_seen

_LOG_OPTIONS: dict[str, Any] = {"display": "none", "log_level": "error", "fail_on_error": False}


@tool
def price() -> Tool:
    """Returns the tool that knows prices."""

    async def execute(item: str) -> str:
        """Returns an item's price.

        Args:
            item: The item's name.
        """
        return RESULTS[0]

    return execute


@tool
def stock() -> Tool:
    """Returns the tool that knows how many are left."""

    async def execute(item: str, shop: str) -> str:
        """Returns how many are left.

        Args:
            item: The item's name.
            shop: The shop.
        """
        if shop != CALLS[1].arguments["shop"]:
            raise ToolError("no such shop")
        return RESULTS[1]

    return execute


def _script(_path: str, body: Json) -> Reply:
    messages = body.get("messages", body.get("input"))
    last = {"content": messages} if isinstance(messages, str) else messages[-1]
    if "Two plus two" in json.dumps(last):
        return Reply(text="It is 4.", prompt_tokens=8, completion_tokens=4)
    is_result = last.get("role") == "tool" or last.get("type") == "function_call_output"
    return REPLIES[1] if is_result else REPLIES[0]


def _task() -> Task:
    image = ContentImage(image=f"data:image/png;base64,{IMAGE}")
    question = ChatMessageUser(content=[ContentText(text="What of this lamp?"), image])
    samples = [
        Sample(id="lamp", input=[question], target="12 €", metadata={"shop": "Åbo"}),
        Sample(id="sum", input="Two plus two?", target="5"),
    ]
    solver = [system_message(SYSTEM), use_tools(price(), stock()), generate()]
    return Task(name="shop", dataset=samples, solver=solver, scorer=[includes(), match()])


def _drop_events(path: Path) -> None:
    """Removes the events of a log, which repeat what is in its samples at great length."""
    log = json.loads(path.read_text(encoding="utf-8"))
    for sample in log["samples"]:
        sample["events"] = []
        sample.pop("timelines", None)
    path.write_text(json.dumps(log, indent=1), encoding="utf-8")


def main() -> None:
    """Writes one log of each format and what the endpoint saw."""
    folder = SAMPLES / "inspect_ai"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for log_format in ("eval", "json"):
        with tempfile.TemporaryDirectory() as scratch, ScriptedEndpoint(_script) as endpoint:
            os.chdir(scratch)
            os.environ |= {"OPENAI_BASE_URL": f"{endpoint.url}/v1", "OPENAI_API_KEY": "none"}
            model = f"openai/{MODEL}"
            (log,) = eval(
                _task(),
                model=model,
                model_args={"responses_api": log_format == "json"},
                log_dir=scratch,
                log_format=log_format,
                **_LOG_OPTIONS,
            )
            written = Path(log.location.removeprefix("file://"))
            if log_format == "json":
                _drop_events(written)
            shutil.copy(written, folder / f"shop.{log_format}")
            view = responses_call if log_format == "json" else chat_call
            calls = [view(seen) for seen in endpoint.seen]
            for message in (message for call in calls for message in call["messages"]):
                # inspect_ai begins a reply with a new line when it sends it back with its thoughts.
                message["content"] = message["content"].removeprefix("\n")
            write_seen(folder / f"{log_format}.seen.json", calls)


if __name__ == "__main__":
    main()

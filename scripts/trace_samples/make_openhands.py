"""Has an agent of OpenHands work with a scripted endpoint, and keeps its events.

`PYTHONPATH=scripts python -m trace_samples.make_openhands`; needs openhands-sdk. The agent calls
two tools of its own at once, is asked again, and condenses what came before. Long instructions and
what names this machine are cut out of the kept files.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.tool import (
    Action,
    Observation,
    ToolDefinition,
    ToolExecutor,
    register_tool,
)
from pydantic import SecretStr

from trace_samples.conversation import CALLS, MODEL, RESULTS
from trace_samples.scripted_endpoint import (
    Json,
    Reply,
    ScriptedEndpoint,
)
from trace_samples.seen import SAMPLES, chat_call, write_seen

_FOLDER = SAMPLES / "openhands"
_PROMPT = "You are OpenHands agent."


class ShopAction(Action):
    """What both tools are given."""

    item: str
    shop: str = ""


class ShopObservation(Observation):
    """What both tools return."""


class _Executor(ToolExecutor[ShopAction, ShopObservation]):
    def __init__(self, result: str) -> None:
        self._result = result

    def __call__(self, action: ShopAction, conversation: Any = None) -> ShopObservation:
        return ShopObservation.from_text(self._result)


class PriceTool(ToolDefinition[ShopAction, ShopObservation]):
    """Returns an item's price."""

    @classmethod
    def create(cls, *_: Any, **__: Any) -> Sequence["PriceTool"]:
        """Returns the tool."""
        return [
            cls(
                description="Returns an item's price.",
                action_type=ShopAction,
                observation_type=ShopObservation,
                executor=_Executor(RESULTS[0]),
            )
        ]


class StockTool(ToolDefinition[ShopAction, ShopObservation]):
    """Returns how many are left."""

    @classmethod
    def create(cls, *_: Any, **__: Any) -> Sequence["StockTool"]:
        """Returns the tool."""
        return [
            cls(
                description="Returns how many are left.",
                action_type=ShopAction,
                observation_type=ShopObservation,
                executor=_Executor(RESULTS[1]),
            )
        ]


def _script(_path: str, body: Json) -> Reply:
    last = body["messages"][-1]
    text = json.dumps(last)
    if not body.get("tools"):
        return Reply(text="They asked for a lamp.", prompt_tokens=400, completion_tokens=6)
    if last["role"] == "tool":
        return Reply(text="12 €; 3 are left.", prompt_tokens=300, completion_tokens=8)
    if "lamp" in text:
        return Reply(
            text="I look.",
            reasoning="Two things are needed.",
            calls=CALLS,
            prompt_tokens=200,
            cached_tokens=50,
            completion_tokens=20,
        )
    return Reply(text="Good bye.", prompt_tokens=100, completion_tokens=3)


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cut(inner) for key, inner in value.items() if key not in _LEFT_OUT}
    if isinstance(value, list):
        return [_cut(inner) for inner in value]
    return _PROMPT if isinstance(value, str) and len(value) > 2000 else value


_LEFT_OUT = frozenset(("tools", "description", "base_url", "workspace", "persistence_dir"))


def main() -> None:
    """Writes the events, the state beside them, and what the endpoint saw."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    events = _FOLDER / "shop" / "events"
    events.mkdir(parents=True)
    register_tool("price", PriceTool)
    register_tool("stock", StockTool)
    with tempfile.TemporaryDirectory() as scratch, ScriptedEndpoint(_script) as endpoint:
        llm = LLM(
            model=f"openai/{MODEL}",
            api_key=SecretStr("none"),
            base_url=f"{endpoint.url}/v1",
            usage_id="agent",
        )
        summing_up = llm.model_copy(update={"usage_id": "condenser"})
        condenser = LLMSummarizingCondenser(llm=summing_up, max_size=8, keep_first=2)
        agent = Agent(llm=llm, tools=[Tool(name="price"), Tool(name="stock")], condenser=condenser)
        conversation = Conversation(
            agent=agent, workspace=scratch, persistence_dir=scratch, visualizer=None
        )
        for question in ("What of the lamp?", "Thanks.", "Bye.", "Bye again."):
            conversation.send_message(question)
            conversation.run()
        conversation.close()
        for path in sorted(Path(scratch).rglob("event-*.json")):
            event = _cut(json.loads(path.read_text(encoding="utf-8")))
            text = json.dumps(event, ensure_ascii=False)
            (events / path.name).write_text(text.replace(scratch, "/project"), encoding="utf-8")
        (state,) = Path(scratch).rglob("base_state.json")
        kept = json.loads(state.read_text(encoding="utf-8"))
        names = ("id", "execution_status", "stats")
        kept = {name: kept[name] for name in names} | {
            "agent": {"llm": {"model": f"openai/{MODEL}"}}
        }
        (_FOLDER / "shop" / "base_state.json").write_text(json.dumps(kept), encoding="utf-8")
        for seen in endpoint.seen:
            seen.body = _cut(seen.body)
    write_seen(_FOLDER / "shop.seen.json", [chat_call(seen) for seen in endpoint.seen])


if __name__ == "__main__":
    main()

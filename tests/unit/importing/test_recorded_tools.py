"""The skill's tools that answer from a log, on the rollouts and prompts of an import."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace
from stillroom.tools.user.file import ToolArgs

PAGE = Path(__file__).parents[3] / "skills/import-traces/references/recorded-tools.md"


def call(question: str, price: str, *, final: str) -> list[dict[str, Any]]:
    """The two calls of a conversation in which the price of a lamp is looked up."""
    look = {"id": "c1", "type": "function"}
    look["function"] = {"name": "price", "arguments": '{ "item":"lamp" }'}
    asks = {"role": "assistant", "content": None, "tool_calls": [look]}
    reply = {"role": "tool", "tool_call_id": "c1", "content": price}
    first = [{"role": "user", "content": question}]
    return [
        {"messages": first, "output": asks},
        {"messages": [*first, asks, reply], "output": {"role": "assistant", "content": final}},
    ]


def test_a_tool_of_the_page_answers_as_the_log_of_the_same_prompt_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*call("Today?", "12", final="12."), *call("Tomorrow?", "15", final="15.")]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    request = ImportRollouts(input="calls.jsonl", output="rollouts/app.jsonl", prompts=True)
    import_rollouts(Workspace(tmp_path), request)
    (tmp_path / "rollouts/app.heldout.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```python recorded_tools.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    module: dict[str, Any] = {}

    exec(found[1], module)  # noqa: S102 - it is our own page

    lines = (tmp_path / "rollouts/app.prompts.jsonl").read_text("utf-8").splitlines()
    prompts = {row["messages"][0]["content"]: row["metadata"] for row in map(json.loads, lines)}
    price = module["price"]
    assert price(item="lamp", args=ToolArgs(metadata=prompts["Today?"])) == "12"
    assert price(item="lamp", args=ToolArgs(metadata=prompts["Tomorrow?"])) == "15"
    with pytest.raises(ValueError, match="not found"):
        price(item="chair", args=ToolArgs(metadata=prompts["Today?"]))

"""Has verifiers run environments on a scripted endpoint, and keeps the results it saves.

`PYTHONPATH=scripts python -m trace_samples.make_verifiers`; run it once with verifiers 0.1.9, which
writes `results.jsonl`, and once with 0.4 (and uv), which writes `traces.jsonl`. The first
environment has tools; the second runs a chat program of verifiers in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trace_samples.conversation import MODEL, REPLIES, RESULTS, SYSTEM
from trace_samples.scripted_endpoint import Json, Reply, ScriptedEndpoint
from trace_samples.seen import SAMPLES, chat_call, write_seen

_TASKSET = """
import verifiers.v1 as vf


class ShopData(vf.TaskData):
    answer: str = ""


class ShopTask(vf.Task[ShopData]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        for prompt, answer in (("What does a lamp cost?", "12"), ("And a chair?", "30")):
            yield ShopTask(ShopData(prompt=prompt, answer=answer), self.config.task)


__all__ = ["Shop"]
"""


def _script(_path: str, body: Json) -> Reply:
    if body["messages"][-1]["role"] == "tool":
        return REPLIES[1]
    if body.get("tools"):
        return REPLIES[0]
    return Reply(text="It costs 12.", reasoning="A price.", prompt_tokens=90, cached_tokens=10)


def price(item: str) -> str:
    """Returns an item's price."""
    return RESULTS[0]


def stock(item: str, shop: str) -> str:
    """Returns how many are left."""
    return RESULTS[1]


def _run_old(endpoint: ScriptedEndpoint, folder: Path) -> Path:
    """Evaluates an environment with tools, and returns the file of results."""
    import verifiers
    from datasets import Dataset
    from openai import AsyncOpenAI

    def has_price(completion: Any, answer: str, **_: Any) -> float:
        return float(answer in str(completion[-1]["content"]))

    rows = [{"prompt": [{"role": "system", "content": SYSTEM},
                        {"role": "user", "content": "What does the lamp cost?"}],
             "answer": "12 €", "info": {"shop": "Åbo"}}]  # fmt: skip
    environment = verifiers.ToolEnv(
        tools=[price, stock],
        dataset=Dataset.from_list(rows),
        rubric=verifiers.Rubric(funcs=[has_price]),
    )
    client = AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none")
    environment.evaluate_sync(
        client=client,
        model=MODEL,
        num_examples=1,
        rollouts_per_example=1,
        results_path=folder / "results",
        save_results=True,
    )
    (results,) = folder.rglob("results.jsonl")
    return results


def _run_new(endpoint: ScriptedEndpoint, folder: Path) -> Path:
    """Evaluates a set of tasks with the command line, and returns the file of traces."""
    (folder / "shop_taskset.py").write_text(_TASKSET, encoding="utf-8")
    program = Path(sys.executable).parent / "vf-eval"
    words = {
        "-m": MODEL,
        "-r": "1",
        "--client.base-url": f"{endpoint.url}/v1",
        "--client.api-key-var": "OPENAI_API_KEY",
        "--env.agent.harness.id": "null",
        "--env.agent.runtime.type": "subprocess",
    }
    subprocess.run(
        [program, "shop_taskset", "--no-push", "--no-rich", *sum(words.items(), ())],
        cwd=folder,
        env=os.environ
        | {
            "OPENAI_API_KEY": "none",
            "PYTHONPATH": str(folder),
            "PATH": f"{program.parent}:{os.environ['PATH']}",
        },
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    (traces,) = folder.rglob("traces.jsonl")
    return traces


def _without_machine(path: Path) -> str:
    """Returns the rows of a file without the endpoint and the folders of this machine."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        for trace in row.get("traces", ()):
            trace["agent"]["runtime"] = {"type": "subprocess"}
            trace["agent"]["config"].pop("client")
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    """Writes the file that this version of verifiers makes, and what the endpoint saw."""
    is_old = version("verifiers").startswith("0.1.")
    folder = SAMPLES / ("verifiers" if is_old else "verifiers_traces")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ScriptedEndpoint(_script) as endpoint:
        path = (_run_old if is_old else _run_new)(endpoint, Path(scratch))
        (folder / path.name).write_text(_without_machine(path), encoding="utf-8")
        metadata = path.parent / "metadata.json"
        if metadata.exists():
            kept = json.loads(metadata.read_text(encoding="utf-8"))
            names = ("env_id", "model", "num_examples", "rollouts_per_example", "sampling_args")
            text = json.dumps({name: kept.get(name) for name in names})
            (folder / "metadata.json").write_text(text + "\n", encoding="utf-8")
    write_seen(folder / f"{path.stem}.seen.json", [chat_call(seen) for seen in endpoint.seen])


if __name__ == "__main__":
    main()

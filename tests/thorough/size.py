"""How long each tool call takes with 200,000 rollouts, and the server's memory. size.py [--rows 200000] [--finish]

A server over stdio is asked for everything that reads the rollouts, the supervised rows made of them, or 200,000 prompts. Operations over
so large files become runs; they are cancelled once their call was timed, unless --finish waits for each of them. Then the pages of the
report are written. Prints one JSON line and exits with 1 if a call took over 2 s or the server ever held over 200 MB.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
from mcp import Client, StdioServerParameters

LIMIT_S, LIMIT_MB = 2.0, 200
ENDED = ("succeeded", "failed", "cancelled", "interrupted")
CONFIG = """dataset_type: sft
model: {path: demo/student}
data: {train_file: sft.jsonl, batch_size: 4}
trainer: {num_epochs: 1}
"""


def write_data(folder: Path, rows: int, chance: random.Random) -> None:
    words = ["".join(chance.choices("abcdefgh", k=6)) for _ in range(2000)]
    with (
        (folder / "prompts.jsonl").open("wb") as prompts,
        (folder / "rollouts.jsonl").open("wb") as rollouts,
        (folder / "sft.jsonl").open("wb") as supervised,
    ):
        for number in range(rows):
            text = f"{number // 2} " + " ".join(chance.choices(words, k=60))
            messages = [
                {"role": "user", "content": text},
                {"role": "assistant", "content": " ".join(chance.choices(words, k=40))},
            ]
            row: dict[str, Any] = {
                "id": f"t{number // 2}-{number % 2}",
                "task_id": f"t{number // 2}",
                "sample": number % 2,
                "messages": messages,
                "tools": [],
                "metadata": {"task_type": "abc"[number % 3]},
                "reward": chance.random(),
                "rewards": {},
                "success": True,
                "stop_reason": "answered",
                "turns": 1,
                "truncated": False,
                "tool_errors": 0,
                "error": None,
                "usage": {"prompt_tokens": 90, "completion_tokens": 60},
                "cost_usd": None,
                "teacher": {"provider": "openai", "model": "m", "settings": {}},
                "started_at": "2026-01-01T00:00:00.000Z",
                "duration_s": 0.5,
                "tokens": None,
            }
            prompts.write(msgspec.json.encode({"prompt": text}) + b"\n")
            rollouts.write(msgspec.json.encode(row) + b"\n")
            supervised.write(msgspec.json.encode({"messages": messages}) + b"\n")
    (folder / "config.yml").write_text(CONFIG, encoding="utf-8")
    (folder / "rewards.py").write_text(
        "from stillroom.rewards import reward\n\n\n@reward\ndef one(messages):\n    return 1.0\n", encoding="utf-8"
    )  # fmt: skip


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("validate_dataset", {"path": "rollouts.jsonl"}),
    ("validate_dataset", {"path": "sft.jsonl", "model": "demo/student"}),
    ("sample_for_review", {"input": "rollouts.jsonl", "output": "review.jsonl"}),
    ("filter_dataset", {"input": "rollouts.jsonl", "output": "good.jsonl", "min_reward": 0.5}),
    ("filter_dataset", {"input": "rollouts.jsonl", "output": "near.jsonl", "dedupe": "near"}),
    ("convert_rollouts", {"input": "rollouts.jsonl", "output": "made.jsonl"}),
    ("make_dpo_pairs", {"input": "rollouts.jsonl", "output": "pairs.jsonl"}),
    ("inspect_examples", {"path": "rollouts.jsonl", "start": 100}),
    ("inspect_examples", {"path": "sft.jsonl", "model": "demo/student"}),
    ("show_lineage", {"path": "rollouts.jsonl"}),
    ("show_lineage", {"path": "rollouts.jsonl", "row": 150}),
    ("generate_rollouts", {"input": "prompts.jsonl", "output": "new.jsonl", "provider": "demo",
                           "model": "teacher", "dry_run": True}),
    ("generate_rollouts", {"input": "prompts.jsonl", "output": "new.jsonl", "provider": "demo",
                           "model": "teacher"}),
    ("score_rollouts", {"input": "rollouts.jsonl", "output": "scored.jsonl",
                        "rewards": "rewards.py"}),
    ("plan_training", {"config": "config.yml"}),
    ("start_training", {"config": "config.yml"}),
    ("evaluate_model", {"data": "prompts.jsonl", "model": "demo/student"}),
    ("list_runs", {}),
    ("check_setup", {}),
]  # fmt: skip


async def timed(folder: Path, finish: bool) -> tuple[list[dict[str, Any]], int]:
    command = ["-m", "stillroom_mcp", "serve", "--workspace", str(folder)]
    server = StdioServerParameters(command=sys.executable, args=command)
    shown: list[dict[str, Any]] = []
    async with Client(server) as client:
        pid = server_pid()

        async def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
            started = time.perf_counter()
            result = await client.call_tool(name, arguments)
            seconds = time.perf_counter() - started
            answer = result.structured_content or {}
            size = sum(len(block.text) for block in result.content)
            shown.append({"call": name, "s": round(seconds, 2), "characters": size,
                          "error": size if result.is_error else None})  # fmt: skip
            if result.is_error:
                raise SystemExit(f"{name}: {result.content[0].text}")
            return answer

        await call("list_runs", {})
        shown.clear()
        for name, arguments in CALLS:
            run_id = (await call(name, arguments)).get("run_id")
            while run_id is not None and name != "list_runs":
                ended = {"run_id": run_id} | ({"wait_s": 50} if finish else {})
                report = await client.call_tool("get_run", ended)
                state = report.structured_content or {}
                if state["status"] in ENDED:
                    shown[-1]["ended"] = state["status"]
                    break
                if not finish:
                    await call("cancel_run", {"run_id": run_id})
                    await anyio.sleep(0.5)
        for name in ("get_run", "get_run_logs"):
            await call(name, {"run_id": run_of(folder)})
        return shown, peak_mb_of(pid)


def peak_mb_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) // 1024


def server_pid() -> int:
    """Returns the process of the server, the only child of this one."""
    children = Path("/proc/self/task").glob("*/children")
    return int(next(text for path in children if (text := path.read_text().split()))[0])


def run_of(folder: Path) -> str:
    return next(path.name for path in sorted((folder / "runs").iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--finish", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, options.rows, random.Random(options.seed))
        calls, peak_mb = anyio.run(timed, folder, options.finish)
    slowest = max(calls, key=lambda call: call["s"])
    passed = slowest["s"] <= LIMIT_S and peak_mb <= LIMIT_MB
    print(
        json.dumps(
            {
                "promise": 11,
                "figure": f"{options.rows:,} rollouts: the slowest of {len(calls)} calls "
                f"({slowest['call']}) took {slowest['s']} s; the server held {peak_mb} MB at most",
                "rows": options.rows,
                "seed": options.seed,
                "slowest_s": slowest["s"],
                "peak_mb": peak_mb,
                "calls": calls,
                "passed": passed,
            }
        )
    )
    sys.exit(not passed)


if __name__ == "__main__":
    main()

"""What the scripts here share: an endpoint of their own, a project, one JSON line out."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SYSTEM = "You are a research assistant. Use the lookup tool. End with 'Final Answer: <answer>'."
TOOLS_PY = '''"""One tool, as a user would write it."""
from stillroom.tools import tool


@tool
def lookup(query: str) -> str:
    """Look up one item."""
    return f"Result for {query}: enzalutamide, exemestane and everolimus are listed."
'''
TOOL_SCHEMA = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up one item.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


def prompt(index: int) -> str:
    return f"Task {index}: which ingredient of the regimen in trial NCT{index:08d} starts with the letter E?"


@contextmanager
def endpoint(*options: str) -> Iterator[tuple[str, Any]]:
    """Gives the base URL of a scripted endpoint and a function that returns its counters."""
    command = [sys.executable, str(HERE / "endpoint.py"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        port = json.loads(process.stdout.readline())["port"]

        def counters() -> dict[str, Any]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/counters") as reply:
                return json.load(reply)

        yield f"http://127.0.0.1:{port}/v1", counters
    finally:
        process.terminate()
        process.wait(10)


def write_project(folder: Path, num_prompts: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.py").write_text(TOOLS_PY)
    lines = [json.dumps({"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt(i)}]})
             for i in range(num_prompts)]  # fmt: skip
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def ours(folder: Path, base_url: str, **options: Any) -> dict[str, Any]:
    """Runs one rollout run of ours in a process of its own and returns its figures."""
    command = [sys.executable, str(HERE / "ours.py"), str(folder), base_url, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    if not lines:
        raise SystemExit(done.stderr)
    return json.loads(lines[-1][2:])


def report(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)

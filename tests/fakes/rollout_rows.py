"""Rollout rows as generate_rollouts writes them, with the parts a test cares about."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
TEACHER = {
    "provider": "openai",
    "model": "m",
    "settings": {"temperature": 0.7, "top_p": 1.0, "max_tokens": 64, "seed": None},
}


def tool_call(name: str = "price", call_id: str = "call_0", arguments: str = "{}") -> dict:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def assistant(text: str | None = None, *calls: dict) -> dict:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {**message, "tool_calls": list(calls)} if calls else message


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def tool_reply(text: str, call_id: str = "call_0") -> dict:
    return {"role": "tool", "tool_call_id": call_id, "name": "price", "content": text}


def rollout_row(**changes: Any) -> dict[str, Any]:
    """A successful rollout of one turn."""
    task_id, sample = changes.get("task_id", "task"), changes.get("sample", 0)
    row = {
        "id": f"{task_id}-{sample}",
        "task_id": task_id,
        "sample": sample,
        "messages": [user("What is 5 + 7?"), assistant("12")],
        "tools": [],
        "metadata": {},
        "reward": 1.0,
        "rewards": {"expected_answer": 1.0},
        "success": True,
        "stop_reason": "answered",
        "turns": 1,
        "truncated": False,
        "tool_errors": 0,
        "error": None,
        "usage": USAGE,
        "cost_usd": None,
        "teacher": TEACHER,
        "started_at": "2026-01-01T00:00:00.000Z",
        "duration_s": 0.5,
        "tokens": None,
    }
    return {**row, **changes}


def write_lines(path: Path, lines: Iterable[bytes], *, end: bytes = b"\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + end for line in lines))
    return path


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    return write_lines(path, [json.dumps(row).encode() for row in rows])


def read_rows(path: Path) -> list[dict[str, Any]]:
    # Not splitlines: JSON strings may hold U+2028 as it is.
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]

"""Small project folders for runs in processes of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.http_endpoint import ScriptedEndpoint
from stillroom import api

ECHO_TOOL = '''
from stillroom.tools import tool

@tool
def echo(text: str) -> str:
    """Say the text again."""
    return text
'''


def write_prompts(path: Path, num: int) -> Path:
    rows = [
        {"prompt": f"question {index}", "metadata": {"expected_answer": "42"}}
        for index in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def endpoint_project(folder: Path, *, num_prompts: int) -> Path:
    """Writes prompts.jsonl and tools.py for the scripted endpoint."""
    write_prompts(folder / "prompts.jsonl", num_prompts)
    (folder / "tools.py").write_text(ECHO_TOOL, encoding="utf-8")
    return folder


def rollouts_request(endpoint: ScriptedEndpoint, **changes: Any) -> api.GenerateRollouts:
    """The request that lets the scripted endpoint answer the prompts of such a project."""
    given = {
        "input": "prompts.jsonl",
        "output": "rollouts/out.jsonl",
        "provider": "openai",
        "base_url": endpoint.base_url,
        "model": "scripted",
        "tools": "tools.py",
    }
    return api.GenerateRollouts(**{**given, **changes})


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def allow_keys(monkeypatch: pytest.MonkeyPatch, folder: Path, *entries: str) -> Path:
    """Writes entries such as `{key: MY_KEY, host: gateway.test}` and returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "keys.yml"
    path.write_text("".join(f"- {entry}\n" for entry in entries), encoding="utf-8")
    monkeypatch.setenv("STILLROOM_CONFIG", str(folder))
    return path

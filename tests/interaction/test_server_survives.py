"""The server over its real transport, with calls that could end or freeze it."""

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError

from fakes.rollout_lines import encoded
from fakes.rollout_rows import rollout_row, write_lines
from fakes.waiting import wait_until
from stillroom.settings import Workspace
from stillroom_mcp.answers import json_safe
from stillroom_mcp.app import build_server

SERVER = StdioServerParameters(command=sys.executable, args=["-P", "-m", "stillroom_mcp", "serve"])
ENDLESS = {"input": "rollouts.jsonl", "output": "kept.jsonl", "contains": "(a+)+$"}


@asynccontextmanager
async def real_server(folder: Path) -> AsyncIterator[Client]:
    parameters = SERVER.model_copy(update={"cwd": str(folder)})
    with anyio.fail_after(110):
        async with Client(parameters) as client:
            yield client


def text_of(result: Any) -> str:
    return " ".join(block.text for block in result.content)


def test_a_name_that_is_no_unicode_is_answered_and_the_server_lives(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/rows/caf\xe9.jsonl")).write_text("{}\n")

    async def main() -> None:
        async with real_server(tmp_path) as client:
            first = await client.call_tool("inspect_examples", {"path": "rows"})
            assert "name is not UTF-8" in text_of(first)
            second = await client.call_tool("list_runs", {})
            assert not second.is_error

    anyio.run(main)


def test_an_answer_that_is_no_json_is_escaped_or_becomes_an_error() -> None:
    assert json_safe({"a": ["x\udce9"], "\ud800": 1}) == {"a": ["x\\udce9"], "\\ud800": 1}
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    with pytest.raises(MCPError, match="result cannot be written as JSON"):
        json_safe(ring)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def is_filtering(process: psutil.Process) -> bool:
    try:
        return "stillroom.jobs.child" in process.cmdline()
    except psutil.Error:
        return False


@pytest.mark.parametrize("ending", ["cancel", "kill"])
def test_a_regex_that_never_ends_ends_with_its_call(tmp_path: Path, ending: str) -> None:
    row = rollout_row()
    row["messages"][-1]["content"] = "a" * 60 + "!"
    write_lines(tmp_path / "rollouts.jsonl", [encoded(row)])

    def found() -> list[psutil.Process]:
        return [child for child in children(os.getpid()) if is_filtering(child)]

    async def main() -> None:
        async with real_server(tmp_path) as client:
            with anyio.move_on_after(60) as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(client.call_tool, "filter_dataset", ENDLESS)
                    while not found():  # noqa: ASYNC110
                        await anyio.sleep(0.05)
                    if ending == "cancel":
                        group.cancel_scope.cancel()
                    else:
                        (server,) = {child.parent() for child in found()}
                        assert server is not None
                        seen.extend(found())
                        server.kill()
                        group.cancel_scope.cancel()
            assert not scope.cancelled_caught
            if ending == "cancel":
                with anyio.fail_after(60):
                    while found():  # noqa: ASYNC110
                        await anyio.sleep(0.05)
                assert not (await client.call_tool("list_runs", {})).is_error

    seen: list[psutil.Process] = []
    try:
        anyio.run(main)
    except BaseException:
        # The client of a killed server ends as it likes.
        if ending == "cancel":
            raise
    wait_until(lambda: not any(child.is_running() for child in seen))


def test_a_config_that_stands_for_billions_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (tmp_path / "config.yml").write_text("\n".join(lines), encoding="utf-8")

    async def main() -> str:
        async with Client(build_server(Workspace(tmp_path))) as client:
            return text_of(await client.call_tool("start_training", {"config": "config.yml"}))

    started = time.process_time()
    text = anyio.run(main)
    assert time.process_time() - started < 10
    assert "aliases expand to more than" in text
    assert len(text) < 1000

"""The server over standard input and output: whole lines, long answers, nothing stray between."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from stillroom_mcp.starting import pipes

SERVER = """
import os, subprocess, sys, anyio
from mcp.server.mcpserver import MCPServer
from stillroom_mcp.starting.pipes import run_stdio
server = MCPServer("s", log_level="ERROR")
@server.tool()
def times(text: str, times: int) -> str:
    print("stray", flush=True)
    os.write(1, b"stray\\n")
    child = subprocess.run(["cat"], capture_output=True, timeout=20)
    return text * times + child.stdout.decode()
anyio.run(run_stdio, server)
"""


def _request(number: int, method: str, params: dict[str, Any]) -> bytes:
    text = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    return json.dumps(text, ensure_ascii=False).encode() + b"\n"


def _call(number: int, text: str, times: int) -> bytes:
    arguments = {"text": text, "times": times}
    return _request(number, "tools/call", {"name": "times", "arguments": arguments})


@pytest.mark.parametrize("is_socket", [False, True])
def test_answers_come_whole_and_nothing_comes_between_them(is_socket: bool, tmp_path: Path) -> None:
    ours, its = socket.socketpair()
    with contextlib.ExitStack() as stack:
        for opened in (ours, its, errors := (tmp_path / "errors.txt").open("wb")):
            stack.enter_context(opened)
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=its if is_socket else subprocess.PIPE,
            stdout=its if is_socket else subprocess.PIPE,
            stderr=errors,
        )
        its.close()
        writing: Any = stack.enter_context(ours.makefile("wb") if is_socket else server.stdin)
        reading: Any = stack.enter_context(ours.makefile("rb") if is_socket else server.stdout)
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}}
        hello["clientInfo"] = {"name": "t", "version": "0"}  # type: ignore[assignment]
        asked = _request(1, "initialize", hello)
        asked += b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\r\n'
        asked += _call(2, "ä€😀", 40_000) + _call(3, "b", 3)
        # In pieces that end anywhere, within letters too.
        pieces = [asked[place : place + 7] for place in range(0, len(asked), 7)]

        def write() -> None:
            for piece in pieces:
                writing.write(piece)
                writing.flush()

        thread = threading.Thread(target=write)
        thread.start()
        answers = {
            answer["id"]: answer for answer in (json.loads(reading.readline()) for _ in "123")
        }
        thread.join(20)
        texts = [answers[number]["result"]["content"][0]["text"] for number in (2, 3)]
        assert texts == ["ä€😀" * 40_000, "bbb"]
        if is_socket:
            ours.shutdown(socket.SHUT_WR)
        else:
            writing.close()
        assert server.wait(20) == 0
        assert reading.read() == b""
    assert (tmp_path / "errors.txt").read_text().count("stray") == 4


def test_a_last_line_without_its_end_and_broken_letters_are_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\n\xff\xfe\n\nlast")
    os.close(writing)

    async def lines() -> list[str]:
        with anyio.fail_after(5):
            return [line async for line in pipes._Lines(reading)]

    assert anyio.run(lines) == ["one", "\ufffd\ufffd", "", "last"]
    os.close(reading)


def test_a_slow_reader_holds_no_other_task_up() -> None:
    reading, writing = os.pipe()
    text = "x" * 500_000
    seen = bytearray()

    async def scenario() -> None:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(pipes._Answers(writing).write, text)
                # The pipe is full by now, and this task goes on.
                await anyio.wait_all_tasks_blocked()
                while len(seen) < len(text):
                    await anyio.wait_readable(reading)
                    seen.extend(os.read(reading, 1 << 16))

    anyio.run(scenario)
    assert seen.decode() == text
    os.close(reading)
    os.close(writing)


def test_files_are_left_to_the_library(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, Path(os.devnull).open("rb") as nothing:
        assert not pipes._can_be_waited_for(file.fileno())
        assert not pipes._can_be_waited_for(nothing.fileno())

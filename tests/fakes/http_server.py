"""Our server over HTTP in a process of its own, and clients of it."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from stillroom.processes import end_process

TOKEN = "the-token-of-these-tests"


@dataclass(frozen=True)
class ServedWorkspace:
    """A server that is running."""

    root: Path
    url: str
    process: subprocess.Popen[str]
    first_lines: str

    def stop(self) -> int:
        """Asks the server to stop, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def served(root: Path, *arguments: str, **variables: str) -> Iterator[ServedWorkspace]:
    """Runs `stillroom serve --http` for a workspace, at any free port."""
    command = [sys.executable, "-P", "-m", "stillroom_mcp", "serve", "--http", "--port", "0"]
    environment = {**os.environ, "STILLROOM_TOKEN": TOKEN, **variables}
    process = subprocess.Popen(
        [*command, "--workspace", str(root), *arguments],
        env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = "".join(process.stderr.readline() for _ in range(3))
        url = lines.split("serves MCP at ")[1].split()[0]
        yield ServedWorkspace(root, url, process, lines)
    finally:
        end_process(process)
        assert process.stderr is not None
        process.stderr.close()


@asynccontextmanager
async def client_at(url: str, mode: str = "auto", token: str = TOKEN) -> AsyncIterator[Client]:
    """A client of the server at a URL that shows the token."""
    headers = {"authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(url, http_client=http)
        async with Client(transport, mode=mode) as client:
            yield client

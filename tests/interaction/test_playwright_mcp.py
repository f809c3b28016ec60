"""The real Playwright MCP server, installed from npm, about a website on this machine."""

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import psutil
import pytest

from fakes.loops import run_async
from stillroom.tools.base import ToolTask
from stillroom.tools.mcp_servers import MCPTools

pytestmark = [pytest.mark.network, pytest.mark.browser]

PAGE = """<title>Room {name}</title><h1>Room {name}</h1>
<p>Visits: <b id=v></b><button onclick="document.title='Lamp {name} is lit'">Light</button>
<script>localStorage.n = +(localStorage.n || 0) + 1; v.textContent = localStorage.n</script>"""
NUM_SESSIONS = 5


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = PAGE.format(name=self.path.strip("/")).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def command(tmp_path: Path) -> str:
    npm, chromium = shutil.which("npm"), shutil.which("chromium")
    assert npm, "no npm"
    assert chromium, "no Chromium: apt-get install chromium"
    install = [npm, "install", "--no-save", "--prefix", str(tmp_path), "@playwright/mcp@latest"]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    return (
        "npx @playwright/mcp --isolated --headless --no-sandbox "
        f"--executable-path {chromium} --output-dir {tmp_path / 'out'}"
    )


def test_five_rollouts_browse_at_once_and_share_no_page(
    site: str, command: str, tmp_path: Path
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    arrived: set[str] = set()
    everybody = anyio.Event()
    pages: dict[str, str] = {}

    async def rollout(tools: MCPTools, name: str) -> None:
        async with tools.session(ToolTask({})) as session:
            opened = await session.call("browser_navigate", {"url": f"{site}/{name}"})
            assert not opened.is_error, opened.content
            arrived.add(name)
            if len(arrived) == NUM_SESSIONS:
                everybody.set()
            await everybody.wait()
            lit = await session.call(
                "browser_evaluate", {"function": "() => document.querySelector('button').click()"}
            )
            assert not lit.is_error, lit.content
            visits = await session.call("browser_evaluate", {"function": "() => localStorage.n"})
            # A profile of its own: it does not see the other rollouts' visits.
            assert '"1"' in visits.content, visits.content
            pages[name] = (await session.call("browser_snapshot", {})).content

    async def main() -> None:
        async with MCPTools(command, folder=tmp_path, max_sessions=NUM_SESSIONS) as tools:
            names = [schema["function"]["name"] for schema in tools.schemas]
            assert {"browser_navigate", "browser_click", "browser_snapshot"} <= set(names)
            async with anyio.create_task_group() as group:
                for index in range(NUM_SESSIONS):
                    group.start_soon(rollout, tools, f"n{index}")

    run_async(main, within_s=240)
    assert len(pages) == NUM_SESSIONS
    for name, page in pages.items():
        assert f"Lamp {name} is lit" in page
        assert f"Room {name}" in page
        assert not any(f"Room {other}" in page for other in pages if other != name)
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert left == set()

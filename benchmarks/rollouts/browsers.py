"""20 rollouts with a page open each: seconds and memory, for every way to a browser. browsers.py [WAY …] [--at-once 20]

WAY: browse (built in), one_server (one Playwright MCP server, `--port {port}`), server_each (over its pipes). The last two
are run in the current folder, after `npm i @playwright/mcp` there (Node 22). Memory is the proportional set size of all child
processes, so shared pages count once.
"""

import argparse
import os
import shutil
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio
import psutil
from common import report

from stillroom.tools.browser.tool import BrowseTools
from stillroom.tools.mcp.servers import MCPTools
from stillroom.tools.source import ToolTask

PAGE = """<title>{0}</title><main><h1>{0}</h1><p id=p></p></main>
<script>p.textContent = localStorage.n || 'new'; localStorage.n = '{0}'</script>"""


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = PAGE.format(self.path.strip("/")).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def measured() -> dict[str, int]:
    """What the child processes hold; one may end while it is looked at."""
    sizes = []
    for child in psutil.Process().children(recursive=True):
        try:
            sizes.append(child.memory_full_info().pss)
        except psutil.Error:
            continue
    return {"processes": len(sizes), "memory_mb": sum(sizes) >> 20}


async def visit(way: str, at_once: int, origin: str) -> dict:
    """Opens all pages, then reads each again: it must be its own, and have been new."""
    server = f"npx @playwright/mcp --isolated --headless --no-sandbox --executable-path {shutil.which('chromium')}"
    tools = {
        "browse": lambda: BrowseTools(allow=[origin.removeprefix("http://")], max_contexts=at_once),
        "server_each": lambda: MCPTools(server, max_sessions=at_once),
        "one_server": lambda: MCPTools(server + " --port {port}", max_sessions=at_once),
    }[way]()  # fmt: skip
    opening, reading = (
        ("browse_open", "browse_read")
        if way == "browse"
        else ("browser_navigate", "browser_snapshot")
    )
    opened, own, all_open, figures = [], [], anyio.Event(), {}

    async def rollout(name: str) -> None:
        async with tools.session(ToolTask({})) as session:
            found = await session.call(opening, {"url": f"{origin}/{name}"})
            assert not found.is_error, found.content
            opened.append(time.perf_counter() - started)
            if len(opened) == at_once:
                figures.update(measured())
                all_open.set()
            await all_open.wait()
            page = (await session.call(reading, {})).content
            own.append(f"{name}\n" in page.replace('"', "\n") and "new" in page)

    begun = time.perf_counter()
    async with tools:
        started = time.perf_counter()
        async with anyio.create_task_group() as group:
            for index in range(at_once):
                group.start_soon(rollout, f"page{index:03}")
    return {
        "seconds_to_start": round(started - begun, 1), "first_page_s": round(min(opened), 1),
        "last_page_s": round(max(opened), 1), "seconds_in_all": round(time.perf_counter() - begun, 1),
        "pages_of_their_own": sum(own), "left_behind": measured()["processes"], **figures,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=["browse", "one_server", "server_each"])
    parser.add_argument("--at-once", type=int, default=20)
    options = parser.parse_args()
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        Thread(target=site.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{site.server_address[1]}"
        for way in options.ways:
            figures = anyio.run(visit, way, options.at_once, origin)
            report(way=way, at_once=options.at_once, cpus=os.cpu_count(), **figures)
        site.shutdown()


if __name__ == "__main__":
    main()

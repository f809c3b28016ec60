"""The views in a chat: a host that renders MCP Apps shows runs and rows by them."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.server.apps import APP_MIME_TYPE
from playwright.sync_api import BrowserContext, FrameLocator, Page

from fakes.dashboards import kept_running
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_rows
from fakes.run_folders import write_training
from fakes.watched_pages import accessibility_faults, watched_page
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server
from stillroom_mcp.dashboard.chat_views import ROWS_VIEW, RUN_VIEW

pytestmark = pytest.mark.browser

ATTACK = "<img src=https://example.com/x.png onerror=document.title='owned'><script>1/0</script>"
# What a host lets a view do that asks for nothing.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'none'"
)
HOST = """<!doctype html><title>host</title>
<iframe sandbox="allow-scripts" width="700" height="700"></iframe>
<script>
const frame = document.querySelector("iframe");
window.heights = [];
const post = (message) => frame.contentWindow.postMessage({jsonrpc: "2.0", ...message}, "*");
addEventListener("message", async ({data, source}) => {
  if (source !== frame.contentWindow) return;
  const {id, method, params} = data;
  if (method === "ui/initialize") post({id, result: {
    protocolVersion: params.protocolVersion, hostInfo: {name: "host", version: "1"},
    hostCapabilities: {serverTools: {}, ...window.more}, hostContext: {theme: window.theme}}});
  else if (method === "ui/notifications/initialized") {
    post({method: "ui/notifications/tool-input", params: {arguments: window.given}});
    const result = await callTool(window.tool, window.given);
    post({method: "ui/notifications/tool-result", params: result});
  } else if (method === "ui/notifications/size-changed") window.heights.push(params.height);
  else if (method === "resources/read") post({id, result: await readResource(params.uri)});
  else if (method === "tools/call") {
    post({id, result: await callTool(params.name, params.arguments)});
  }
});
</script>"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    call = tool_call("price", arguments=json.dumps({"item": ATTACK}))
    talk = [assistant("I look.", call), tool_reply(f"error: {ATTACK}"), assistant(ATTACK)]
    rows = [rollout_row(messages=[user(f"Task {n} {ATTACK}"), *talk]) for n in range(5)]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs an async function in a thread: Playwright has the loop of this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(anyio.run, function, *arguments).result(60)


async def _call(folder: Path, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    async with Client(build_server(Workspace(folder))) as client:
        result = await client.call_tool(name, arguments)
        return result.model_dump(by_alias=True, mode="json")


async def _resource(folder: Path, uri: str) -> dict[str, Any]:
    async with Client(build_server(Workspace(folder))) as client:
        return (await client.read_resource(uri)).model_dump(by_alias=True, mode="json")


async def _view(folder: Path, uri: str) -> str:
    async with Client(build_server(Workspace(folder))) as client:
        (content,) = (await client.read_resource(uri)).contents
        assert content.mime_type == APP_MIME_TYPE
        return content.text


@pytest.fixture
def hosted(context: BrowserContext, folder: Path) -> Iterator[Any]:
    """Opens the view of a tool's result in a host, which lets nothing out."""
    page, asked, wrong = watched_page(context)
    page.expose_function("readResource", lambda uri: _apart(_resource, folder, uri))
    page.expose_function("callTool", lambda name, given: _apart(_call, folder, name, given))

    def opened(
        uri: str, tool: str, *, can_read: bool = False, theme: str = "dark", **given: Any
    ) -> tuple[Page, FrameLocator]:
        page.set_content(HOST)
        html = _apart(_view, folder, uri).replace(
            "<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        )
        page.evaluate("(given) => Object.assign(window, given)", {
            "tool": tool, "given": given, "theme": theme,
            "more": {"serverResources": {}} if can_read else {},
        })  # fmt: skip
        page.evaluate("(html) => frame.srcdoc = html", html)
        return page, page.frame_locator("iframe")

    yield opened
    assert page.title() == "host"
    page.close()
    assert [url for url in asked if not url.startswith(("data:", "about:"))] == []
    assert wrong == []


@pytest.mark.parametrize(
    ("can_read", "theme", "background"),
    [(True, "dark", "rgb(18, 20, 23)"), (False, "light", "rgb(251, 251, 249)")],
)
def test_a_run_shows_curves_that_move(
    hosted: Any, folder: Path, can_read: bool, theme: str, background: str
) -> None:
    run = write_training(folder / "runs", "sft-now", [{"loss": 2.0}], status="running")
    with kept_running(run):
        page, view = hosted(RUN_VIEW, "get_run", run_id="sft-now", can_read=can_read, theme=theme)
        change = view.locator("figure[data-metric=loss] .change")
        change.get_by_text("2", exact=True).wait_for()
        with (run / "events.jsonl").open("a", encoding="utf-8") as events:
            for step in (2, 3, 4):
                values = {"loss": 2 / step}
                row = {"time": "t", "event": "metrics", "step": step, "values": values}
                events.write(json.dumps(row) + "\n")
        change.get_by_text("2 → 0.5", exact=True).wait_for()
    assert view.locator("canvas").count() == 1
    colour = view.locator("body").evaluate("(body) => getComputedStyle(body).backgroundColor")
    assert colour == background
    assert accessibility_faults(page, page.frames[1]) == ""
    assert page.evaluate("heights.at(-1)") > 200


def test_rows_show_conversations_and_the_next_ones(hosted: Any) -> None:
    page, view = hosted(ROWS_VIEW, "inspect_examples", path="rows.jsonl", n=2)
    view.get_by_text("I look.").first.wait_for()
    said = view.locator("details.call .said").first
    assert not said.is_visible()
    view.locator("details.call > summary").first.click()
    assert ATTACK in said.inner_text()
    view.get_by_role("button", name="Next rows").click()
    view.get_by_role("heading", name="rows.jsonl:3").wait_for()
    assert view.locator("main img").count() == 0
    assert accessibility_faults(page, page.frames[1]) == ""


def test_tools_name_their_views_and_the_server_says_that_it_has_them(folder: Path) -> None:
    async def scenario() -> None:
        async with Client(build_server(Workspace(folder))) as client:
            assert "io.modelcontextprotocol/ui" in (client.server_capabilities.extensions or {})
            tools = {tool.name: tool.meta for tool in (await client.list_tools()).tools}
            resources = {str(one.uri) for one in (await client.list_resources()).resources}
        bound = {name: meta["ui"]["resourceUri"] for name, meta in tools.items() if meta}
        assert bound["get_run"] == bound["start_training"] == RUN_VIEW
        assert bound["inspect_examples"] == ROWS_VIEW
        assert set(bound.values()) <= resources

    _apart(scenario)


def test_a_view_ends_its_scripts_nowhere_but_at_their_end(folder: Path) -> None:
    for uri in (RUN_VIEW, ROWS_VIEW):
        html = _apart(_view, folder, uri)
        assert html.count("</script") == 1
        assert html.count("</style") == 1

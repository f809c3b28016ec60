"""The browser's tools under the names of the Playwright MCP server."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fakes.waiting import run_async
from stillroom.tools.browser.tool import BrowseTools, PlaywrightNames
from stillroom.tools.source import ToolResult, ToolSource, ToolTask
from stillroom.types import ToolSchema


class Echo(ToolSource):
    """Stands for the open browser; its reply is the call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return []

    @property
    def keeps_state(self) -> bool:
        return True

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator["Echo"]:
        yield self

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self.calls.append((name, arguments))
        text = "there is no element [3]; browse_read lists the elements"
        return ToolResult(content=text, is_error=True)


def called(name: str, arguments: dict[str, Any]) -> tuple[Echo, ToolResult]:
    browser = Echo()

    async def main() -> ToolResult:
        async with PlaywrightNames(browser).session(ToolTask({})) as session:
            return await session.call(name, arguments)

    return browser, run_async(main)


@pytest.mark.parametrize(
    ("name", "arguments", "own"),
    [
        ("browser_navigate", {"url": "https://a.b"}, ("browse_open", {"url": "https://a.b"})),
        ("browser_navigate_back", {}, ("browse_back", {})),
        ("browser_snapshot", {}, ("browse_read", {})),
        ("browser_snapshot", {"page": 2}, ("browse_read", {"page": 2})),
        ("browser_click", {"element": "Go", "target": "3"}, ("browse_click", {"ref": 3})),
        ("browser_click", {"element": "Go", "ref": "e3"}, ("browse_click", {"ref": 3})),
        (
            "browser_type",
            {"element": "Word", "target": "[4]", "text": "a", "submit": True},
            ("browse_type", {"ref": 4, "text": "a", "submit": True}),
        ),
        (
            "browser_select_option",
            {"target": "5", "values": ["red"]},
            ("browse_type", {"ref": 5, "text": "red"}),
        ),
    ],
)
def test_a_call_goes_to_the_browsers_own_tool(
    name: str, arguments: dict[str, Any], own: tuple[str, dict[str, Any]]
) -> None:
    browser, result = called(name, arguments)

    assert browser.calls == [own]
    assert result.content == "there is no element [3]; browser_snapshot lists the elements"
    schemas = {one["function"]["name"]: one for one in BrowseTools().schemas}
    parameters = schemas[own[0]]["function"]["parameters"]["properties"]
    assert own[1].keys() <= parameters.keys()


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        (
            "browser_evaluate",
            {},
            "not offered by the browser on this machine; its tools are",
        ),
        ("browser_click", {"target": "the button"}, "is not a number of the snapshot"),
        ("browser_click", {}, "target"),
        ("browser_select_option", {"target": "1", "values": ["a", "b"]}, "give one option"),
    ],
)
def test_what_it_cannot_do_is_an_error_that_says_so(
    name: str, arguments: dict[str, Any], problem: str
) -> None:
    browser, result = called(name, arguments)

    assert browser.calls == []
    assert result.is_error
    assert problem in result.content


def test_all_schemas_are_the_servers_names() -> None:
    tools = PlaywrightNames(Echo())

    assert tools.keeps_state
    names = [schema["function"]["name"] for schema in tools.schemas]
    assert names == [
        "browser_navigate", "browser_navigate_back", "browser_snapshot", "browser_click",
        "browser_type", "browser_select_option",
    ]  # fmt: skip

"""The server that answers before the engine is loaded says what the whole server says."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

import stillroom_mcp.__main__ as entry
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server
from stillroom_mcp.early_server import EarlyServer


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_host_cannot_tell_the_two_servers_apart(tmp_path: Path, mode: str) -> None:
    async def seen(server: Any) -> list[Any]:
        async with Client(server, mode=mode) as client:
            answers = [
                client.server_capabilities,
                client.server_info,
                client.instructions,
                await client.list_tools(),
                await client.list_prompts(),
                await client.list_resources(),
                await client.list_resource_templates(),
                await client.call_tool("list_runs", {}),
                await client.call_tool("list_runs", {"sttus": "x"}),
                await client.complete(
                    {"type": "ref/prompt", "name": "curate"}, {"name": "rows", "value": ""}
                ),
            ]
            return [answer.model_dump() if hasattr(answer, "model_dump") else answer
                    for answer in answers]  # fmt: skip

    async def scenario() -> None:
        with anyio.fail_after(60):
            early = await seen(EarlyServer(tmp_path))
            assert early == await seen(build_server(Workspace(tmp_path)))

    anyio.run(scenario)


def test_it_lists_its_tools_without_the_engine(tmp_path: Path) -> None:
    script = (
        "import sys, anyio\n"
        "from mcp import Client\n"
        "from stillroom_mcp.early_server import EarlyServer\n"
        "async def main():\n"
        "    async with Client(EarlyServer('.')) as client:\n"
        "        assert (await client.list_tools()).tools\n"
        "        print([m for m in sys.modules if m in ('stillroom.api', 'stillroom_mcp.app')])\n"
        "        await client.call_tool('list_runs', {})\n"
        "        print('stillroom.api' in sys.modules)\n"
        "anyio.run(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == ["[]", "True"]


@pytest.mark.parametrize(
    ("given", "is_early"),
    [
        (["serve"], True),
        (["serve", "--workspace", "."], True),
        (["serve", "--workspace=."], True),
        (["serve", "--workspace", "nowhere"], False),
        (["serve", "--workspace"], False),
        (["serve", "--http"], False),
        (["serve", "--read-only"], False),
        (["list-runs"], False),
        ([], False),
    ],
)
def test_only_a_plain_serve_starts_the_early_server(
    given: list[str], is_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STILLROOM_WORKSPACE", raising=False)
    assert (entry._plain_serve_folder(given) is not None) == is_early

"""One process of an MCP server for all rollouts, over HTTP at a port that it is given."""

import os
import signal
from pathlib import Path

import anyio
import pytest

from fakes.mcp_servers import odd_server, port_server
from fakes.user_files import child_pids, is_alive, suspend, wait_for_end
from fakes.waiting import run_async
from stillroom.errors import CallFailedError, FailureClass, InputError
from stillroom.tools.mcp.servers import MCPSession, MCPTools
from stillroom.tools.mcp.spec import parse_spec
from stillroom.tools.source import ToolTask

TASK = ToolTask({})
NUM_SESSIONS = 10


async def text_of(session: MCPSession, name: str) -> str:
    return (await session.call(name, {})).content


def test_a_port_may_stand_anywhere_in_a_command() -> None:
    spec = parse_spec("serve --at=0.0.0.0:{port} x").at_port(81)

    assert spec.command == ("serve", "--at=0.0.0.0:81", "x")
    assert spec.url == "http://localhost:81/mcp"
    assert not parse_spec("serve --port 81").is_shared


def test_sessions_in_one_process_see_nothing_of_each_other() -> None:
    pids: list[str] = []
    everybody = anyio.Event()

    async def rollout(tools: MCPTools) -> None:
        async with tools.session(TASK) as session:
            assert [await text_of(session, "count") for _ in range(3)] == ["1", "2", "3"]
            pids.append(await text_of(session, "pid"))
            if len(pids) == NUM_SESSIONS:
                everybody.set()
            await everybody.wait()
            assert await text_of(session, "count") == "4"

    async def main() -> None:
        # All are open at once.
        async with MCPTools(port_server()) as tools, anyio.create_task_group() as group:
            for _ in range(NUM_SESSIONS):
                group.start_soon(rollout, tools)

    before = child_pids()
    run_async(main, within_s=90)
    assert len(pids) == NUM_SESSIONS
    assert len(set(pids)) == 1
    assert not is_alive(int(pids[0]))
    assert child_pids() <= before


def test_a_shared_server_that_died_is_started_again_and_the_loss_is_told() -> None:
    async def main() -> None:
        async with MCPTools(port_server()) as tools, tools.session(TASK) as session:
            first, child = [await text_of(session, name) for name in ("pid", "fork")]
            assert await text_of(session, "count") == "1"
            os.kill(int(first), signal.SIGKILL)
            await wait_for_end(int(first))
            lost = await session.call("count", {})
            assert lost.is_error
            assert "the next call restarts it" in lost.content
            async with tools.session(TASK) as other:
                assert await text_of(session, "count") == "1"
                assert not is_alive(int(child))
                assert await text_of(other, "pid") == await text_of(session, "pid") != first

    run_async(main)


def test_a_session_that_finds_the_shared_server_gone_begins_with_a_new_one() -> None:
    async def main() -> None:
        async with MCPTools(port_server()) as tools:
            async with tools.session(TASK) as session:
                first = await text_of(session, "pid")
                assert await text_of(session, "unlisten") == "deaf"
            async with tools.session(TASK) as other:
                assert await text_of(other, "count") == "1"
                assert await text_of(other, "pid") != first
            assert not is_alive(int(first))

    run_async(main)


def test_a_shared_server_that_hangs_is_replaced_for_the_next_session() -> None:
    async def main() -> None:
        tools = MCPTools(port_server(), tool_timeout_s=2, start_timeout_s=8)
        async with tools, tools.session(TASK) as session:
            first = await text_of(session, "pid")
            suspend(int(first))
            assert "timed out after 2 s" in await text_of(session, "count")
            with pytest.raises(CallFailedError, match="timed out after 8 s") as caught:
                await session.call("count", {})
            assert caught.value.kind is FailureClass.TOOL_HOST
            assert not is_alive(int(first))
            assert await text_of(session, "count") == "1"

    run_async(main)


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (port_server("die"), r"code 3; its last output:\nno licence found"),
        (port_server("deaf"), r"did not listen on port \d+ within 0\.5 s"),
        (["no-such-program", "{port}"], "cannot be used: .*No such file"),
        ("true {port}", "its process exited with code 0"),
    ],
)
def test_a_shared_server_that_does_not_start_is_an_error_before_any_rollout(
    server: str | list[str], problem: str
) -> None:
    before = child_pids()

    async def opened() -> None:
        async with MCPTools(server, start_timeout_s=0.5 if "deaf" in server else 30):
            raise AssertionError("a server that cannot be used was opened")

    with pytest.raises(InputError, match=problem) as caught:
        run_async(opened)
    assert "listen on the port" in caught.value.fix
    assert child_pids() <= before


def test_no_more_servers_start_at_once_than_help(tmp_path: Path) -> None:
    """Each is slow to start, and notes how many others are starting."""
    code = (
        "import pathlib, sys, time, uuid\n"
        "here = pathlib.Path(sys.argv[1]) / uuid.uuid4().hex\n"
        "here.touch()\n"
        "num = len(list(here.parent.iterdir()))\n"
        "open(sys.argv[2], 'a').write(f'{num}\\n')\n"
        "time.sleep(0.3)\n"
        "here.unlink()\n"
        "import os; os.execv(sys.argv[3], sys.argv[3:])\n"
    )
    starting, seen = tmp_path / "starting", tmp_path / "seen"
    starting.mkdir()
    server = odd_server()
    command = [server[0], "-S", "-E", "-c", code, str(starting), str(seen), *server]

    async def rollout(tools: MCPTools) -> None:
        async with tools.session(TASK) as session:
            assert await text_of(session, "count") == "1"

    async def main() -> None:
        async with MCPTools(command) as tools, anyio.create_task_group() as group:
            for _ in range(NUM_SESSIONS):
                group.start_soon(rollout, tools)

    run_async(main, within_s=120)
    counts = [int(line) for line in seen.read_text().split()]
    assert len(counts) == NUM_SESSIONS + 1
    assert max(counts) <= 2 * (os.cpu_count() or 1)

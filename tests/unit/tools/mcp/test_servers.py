"""Tools of MCP servers, with real processes and real HTTP on the loopback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from fakes.mcp_servers import (
    NESTED_SCHEMA,
    counting_server,
    odd_server,
    sdk_server,
    serve_http,
    serve_odd,
)
from fakes.user_files import child_pids, is_alive, wait_for, wait_for_end
from fakes.waiting import run_async
from stillroom.errors import CallFailedError, FailureClass, InputError
from stillroom.tools.mcp.servers import MCPTools
from stillroom.tools.source import ToolResult, ToolTask, error_result

TASK = ToolTask({})
LOST = "The tool server was stopped and its state is lost; the next call restarts it"


def results_of(tools: MCPTools, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    """The results of calls that follow one another in one session."""

    async def main() -> list[ToolResult]:
        async with tools, tools.session(TASK) as session:
            return [await session.call(name, arguments) for name, arguments in calls]

    return run_async(main)


def texts_of(tools: MCPTools, *names: str) -> list[str]:
    return [result.content for result in results_of(tools, *((name, {}) for name in names))]


def names_of(tools: MCPTools) -> list[str]:
    async def main() -> list[str]:
        async with tools:
            return [schema["function"]["name"] for schema in tools.schemas]

    return run_async(main)


async def opened(tools: MCPTools) -> None:
    async with tools:
        raise AssertionError("a server that cannot be used was opened")


def test_all_pages_of_tools_are_offered_with_their_schemas_as_they_are() -> None:
    async def main() -> None:
        async with MCPTools(odd_server()) as tools:
            assert tools.keeps_state
            nested, chatter, *others = tools.schemas
            assert nested == {
                "type": "function",
                "function": {"name": "nested", "description": "", "parameters": NESTED_SCHEMA},
            }
            assert list(nested["function"]["parameters"]) == list(NESTED_SCHEMA)
            assert chatter["function"]["description"] == "Do chatter."
            names = [schema["function"]["name"] for schema in others]
            assert names == sorted(names)
            assert {"structured", "fail"} <= set(names)

    run_async(main)


def test_arguments_arrive_as_the_model_wrote_them() -> None:
    arguments = {"a": None, "b": [None, {"c": None}], "d": {}, "ü": 1.5}

    [result] = results_of(MCPTools(odd_server()), ("echo", arguments))

    assert result.content == '{"a": null, "b": [null, {"c": null}], "d": {}, "\\u00fc": 1.5}'


def test_results_are_shown_as_text() -> None:
    fail, structured, mixed, half, nonsense, unknown = results_of(
        MCPTools(odd_server()),
        *((name, {}) for name in ("fail", "structured", "mixed", "half_character", "nonsense")),
        ("absent", {}),
    )

    assert fail == ToolResult(content="no lamp", is_error=True)
    assert structured == ToolResult(content='{"lamp": [1, null, "ü"]}', is_error=False)
    assert mixed.content.split("\n") == [
        "before",
        "[image image/png, 5 bytes]",
        "[audio audio/wav, 5 bytes]",
        "[resource file:///a, 9 bytes]",
        "[resource file:///a.bin application/zip, 5 bytes]",
        "[resource file:///a.txt text/plain, 5 bytes]",
        "lämp",
    ]
    assert half.content == "lamp ?"
    assert nonsense.is_error
    assert "not a valid tool result" in nonsense.content
    assert unknown == error_result("absent: no such tool")


def test_sessions_see_nothing_of_each_other_in_processes() -> None:
    check_isolation(MCPTools(odd_server(), max_sessions=8), 8)


def check_isolation(tools: MCPTools, num_sessions: int) -> None:
    """All sessions are open before the first one ends, and each counts for itself."""
    seen: list[list[str]] = []
    everybody = anyio.Event()

    async def rollout() -> None:
        async with tools.session(TASK) as session:
            texts = [(await session.call("count", {})).content for _ in range(3)]
            seen.append(texts)
            if len(seen) == num_sessions:
                everybody.set()
            await everybody.wait()
            assert (await session.call("count", {})).content == "4"

    async def main() -> None:
        async with tools, anyio.create_task_group() as group:
            for _ in range(num_sessions):
                group.start_soon(rollout)

    run_async(main, within_s=90)
    assert seen == [["1", "2", "3"]] * num_sessions


def test_a_server_of_the_sdk_is_spoken_to_over_its_pipes() -> None:
    count, again, added, failed = results_of(
        MCPTools(sdk_server()), ("count", {}), ("count", {}), ("add", {"a": 1}), ("fail", {})
    )

    assert (count.content, again.content, added.content) == ("1", "2", "2")
    assert failed.is_error
    assert "no lamp" in failed.content


def test_a_server_that_only_speaks_sse_is_understood() -> None:
    with serve_http(counting_server().sse_app()) as address:
        added, failed = results_of(
            MCPTools(f"{address}/sse"), ("add", {"a": 1, "b": 2}), ("fail", {})
        )

    assert added == ToolResult(content="3", is_error=False)
    assert failed.is_error


def test_a_server_without_the_handshake_is_understood() -> None:
    assert texts_of(MCPTools(odd_server("modern")), "count", "count") == ["1", "2"]


def test_calls_of_one_turn_run_in_their_order() -> None:
    texts: list[str] = []

    async def main() -> None:
        async with MCPTools(odd_server()) as tools, tools.session(TASK) as session:

            async def count() -> None:
                texts.append((await session.call("count", {})).content)

            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(count)

    run_async(main)
    assert texts == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hang", "error: hang: timed out after 3 s."),
        ("die", "error: die: the connection ended; its process exited with code 7."),
        ("close", "error: close: "),
        ("endless", "error: endless: "),
    ],
)
def test_a_process_that_hangs_or_dies_is_replaced_and_the_model_told(
    name: str, problem: str
) -> None:
    tools = MCPTools(odd_server(), tool_timeout_s=3 if name == "hang" else 60)

    one, count, lost, other, again = texts_of(tools, "pid", "count", name, "pid", "count")

    assert lost.startswith(problem)
    assert lost.endswith(LOST)
    assert one != other
    assert not is_alive(int(one))
    assert (count, again) == ("1", "1")


def test_an_http_server_that_hangs_gets_a_new_session() -> None:
    with serve_odd() as server:
        tools = MCPTools(f"http://127.0.0.1:{server.server_address[1]}/mcp", tool_timeout_s=3)
        count, hung, again = texts_of(tools, "count", "hang", "count")
        assert server.RequestHandlerClass.sessions == {}

    assert (count, again) == ("1", "1")
    assert hung == f"error: hang: timed out after 3 s. {LOST}"


def test_an_http_server_that_forgets_a_session_is_given_a_new_one() -> None:
    async def main() -> None:
        async with MCPTools(url) as tools, tools.session(TASK) as session:
            assert (await session.call("count", {})).content == "1"
            server.RequestHandlerClass.sessions.clear()
            assert await session.call("count", {}) == error_result(
                f"count: the connection ended. {LOST}"
            )
            assert (await session.call("count", {})).content == "1"

    with serve_odd() as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
        run_async(main)


def test_an_http_server_that_goes_away_fails_its_rollouts_only() -> None:
    async def main() -> None:
        with serve_odd() as server:
            tools = MCPTools(f"http://127.0.0.1:{server.server_address[1]}/mcp")
            await tools.__aenter__()
        try:
            async with tools.session(TASK) as session:
                with pytest.raises(CallFailedError, match="cannot open a session with ") as caught:
                    await session.call("count", {})
                assert caught.value.kind is FailureClass.TOOL_HOST
        finally:
            await tools.__aexit__(None, None, None)

    run_async(main)


def test_megabytes_on_every_stream_do_no_harm() -> None:
    chatter, flood, count = texts_of(MCPTools(odd_server()), "chatter", "flood", "count")

    assert chatter == "done"
    assert flood == "x" * 1_000_000 + "… (cut; 5000000 characters in all)"
    assert count == "1"


@pytest.mark.parametrize("starter", ["fork", "fork_session"])
@pytest.mark.parametrize("end", ["count", "die"])
def test_nothing_a_server_started_is_left(starter: str, end: str) -> None:
    before = child_pids()

    pid, child, _ = texts_of(MCPTools(odd_server()), "pid", starter, end)

    run_async(wait_for_end, int(pid))
    run_async(wait_for_end, int(child))
    assert child_pids() <= before


def test_a_server_that_does_not_end_by_itself_is_killed_with_its_rollout() -> None:
    [pid] = texts_of(MCPTools(odd_server("stay")), "pid")

    assert not is_alive(int(pid))


def test_cancelling_a_rollout_ends_its_process(tmp_path: Path) -> None:
    file, before = tmp_path / "pid", child_pids()

    async def rollout(tools: MCPTools) -> None:
        async with tools.session(TASK) as session:
            await session.call("hang", {"file": str(file)})

    async def main() -> None:
        async with MCPTools(odd_server()) as tools:
            async with anyio.create_task_group() as group:
                group.start_soon(rollout, tools)
                await wait_for(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
                group.cancel_scope.cancel()
            assert not is_alive(int(file.read_bytes()))
            async with tools.session(TASK) as session:
                assert (await session.call("count", {})).content == "1"

    run_async(main)
    assert child_pids() <= before


def test_an_error_in_a_rollout_stays_itself_and_leaves_no_process() -> None:
    before = child_pids()

    async def main() -> None:
        async with MCPTools(odd_server()) as tools, tools.session(TASK) as session:
            await session.call("count", {})
            raise LookupError("out")

    with pytest.raises(LookupError):
        run_async(main)
    assert child_pids() <= before


@pytest.mark.parametrize("end", ["count", "hang"])
def test_a_server_ends_when_the_run_is_killed(end: str, tmp_path: Path) -> None:
    code = (
        "import anyio, sys\n"
        "from stillroom.tools.source import ToolTask\n"
        "from stillroom.tools.mcp.servers import MCPTools\n"
        "async def main():\n"
        "    async with MCPTools(sys.argv[2:]) as tools:\n"
        "        async with tools.session(ToolTask({})) as session:\n"
        "            for name in ('pid', 'fork', 'fork_session'):\n"
        "                print((await session.call(name, {})).content, flush=True)\n"
        "            await session.call(sys.argv[1], {})\n"
        "            await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    command = [sys.executable, "-c", code, end, *odd_server()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(3)]
        assert all(map(is_alive, pids))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=60)

    for pid in pids:
        run_async(wait_for_end, pid)


def test_no_more_sessions_are_open_than_allowed() -> None:
    open_now = most = 0

    async def rollout(tools: MCPTools) -> None:
        nonlocal open_now, most
        async with tools.session(TASK) as session:
            open_now += 1
            most = max(most, open_now)
            await session.call("count", {})
            open_now -= 1

    async def main() -> None:
        async with (
            MCPTools(odd_server(), max_sessions=2) as tools,
            anyio.create_task_group() as group,
        ):
            for _ in range(5):
                group.start_soon(rollout, tools)

    run_async(main)
    assert most == 2


def test_a_session_without_calls_starts_nothing() -> None:
    async def main() -> None:
        async with MCPTools(odd_server()) as tools:
            before = child_pids()
            async with tools.session(TASK):
                assert child_pids() <= before

    run_async(main)


def test_a_server_that_does_not_start_again_fails_its_rollout_only(tmp_path: Path) -> None:
    tools = MCPTools(odd_server("die-later", str(tmp_path / "known")))

    with pytest.raises(
        CallFailedError, match=r"exited with code 4(.|\n)*the port is taken"
    ) as caught:
        texts_of(tools, "count")
    assert caught.value.kind is FailureClass.TOOL_HOST


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (odd_server("die"), r"code 3; its last output:\nno licence found"),
        (odd_server("deaf"), r"timed out after 0\.5 s"),
        (odd_server("endless-list"), "the tool list has more than 100 pages"),
        ("no-such-program --x", "`no-such-program --x` cannot be used: .*No such file"),
        ("true", "its process exited with code 0"),
        (
            "http://user:hidden@127.0.0.1:1/mcp?key=hidden",
            "`http://127.0.0.1:1/mcp` cannot be used",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error_before_any_rollout(
    server: str | list[str], problem: str
) -> None:
    before = child_pids()

    with pytest.raises(InputError, match=problem) as caught:
        run_async(opened, MCPTools(server, start_timeout_s=0.5 if "deaf" in server else 30))
    assert "hidden" not in str(caught.value)
    assert "manually" in caught.value.fix or "URL" in caught.value.fix
    assert child_pids() <= before


@pytest.mark.parametrize("server", ["", [], "npx 'a"])
def test_what_names_no_server_is_refused(server: str | list[str]) -> None:
    with pytest.raises(InputError, match="the MCP server "):
        MCPTools(server)


def test_a_url_where_no_server_is_names_the_answer() -> None:
    with serve_odd() as server:
        server.RequestHandlerClass.do_POST = answer_not_found
        url = f"http://127.0.0.1:{server.server_address[1]}/wrong"
        with pytest.raises(InputError, match=r"`http://.*/wrong` cannot be used: Not Found"):
            run_async(opened, MCPTools(url))


def answer_not_found(handler: Any) -> None:
    handler.rfile.read(int(handler.headers["content-length"]))
    handler._send(404, None, {})


def test_a_prefix_tells_the_tools_of_two_servers_apart() -> None:
    tools = MCPTools(odd_server(), prefix="shop_")
    assert {"shop_count", "shop_echo"} <= set(names_of(tools))

    [text] = texts_of(MCPTools(odd_server(), prefix="shop_"), "shop_count")
    assert text == "1"


def test_the_folder_and_the_environment_are_the_given_ones(tmp_path: Path) -> None:
    tools = MCPTools(odd_server(), folder=tmp_path, environment={"LAMP": "red"})

    lamp, path = results_of(tools, ("environ", {"name": "LAMP"}), ("environ", {"name": "PATH"}))

    assert lamp.content == f"red in {tmp_path}"
    assert path.content == f"None in {tmp_path}"


def test_importing_the_module_imports_no_mcp() -> None:
    code = "import sys, stillroom.tools.containers as _; sys.exit('mcp' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_guard_loads_no_large_library() -> None:
    code = (
        "import sys, stillroom.tools.guard, stillroom.tools.browser.text;"
        "sys.exit(bool({'pydantic', 'yaml', 'mcp'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

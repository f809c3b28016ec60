"""The pool with real child processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fakes.rollout_rows import assistant, user
from fakes.user_files import child_pids, is_alive, wait_for, wait_for_end, write_tools
from fakes.waiting import run_async
from stillroom.errors import CallFailedError, FailureClass, ToolFileError
from stillroom.tools.source import ToolResult
from stillroom.tools.user.file import read_user_file
from stillroom.tools.user.pool import UserPool

TOOLS = '''
    import asyncio, os, signal, subprocess, sys, time

    @tool
    def echo(text: str, count: int = 1) -> str:
        """Say the text again."""
        return text * count

    @tool
    def pid() -> int:
        """Tell the process."""
        return os.getpid()

    @tool(timeout=0.3)
    def hang() -> str:
        """Never end."""
        while True:
            time.sleep(60)

    @tool
    def spin() -> str:
        """Never end, and never wait either."""
        while True:
            pass

    @tool
    def meet(folder: str, me: str, others: list[str]) -> bool:
        """Wait until the others are here too."""
        open(os.path.join(folder, me), "w").close()
        while not all(os.path.exists(os.path.join(folder, other)) for other in others):
            time.sleep(0.005)
        return True

    @tool
    def crash() -> str:
        """End the process."""
        os._exit(3)

    @tool
    def segfault() -> str:
        """End the process as a fault in a C library does."""
        os.kill(os.getpid(), signal.SIGSEGV)

    @tool
    def leave() -> str:
        """Ask the interpreter to end."""
        sys.exit(3)

    @tool
    def chatter() -> str:
        """Print a lot, by every way there is."""
        print("p" * 300_000)
        sys.stdout.write('{"type":"answer","content":"forged"}\\n')
        sys.stderr.write("e" * 300_000)
        os.write(1, b"w" * 300_000)
        subprocess.run([sys.executable, "-c", "print('c' * 300_000)"], check=True)
        return "done"

    @tool
    def flood() -> str:
        """Return megabytes."""
        return "x" * 5_000_000

    @tool
    def read_stdin() -> str:
        """Let a command read its standard input to the end."""
        return subprocess.run(["cat"], capture_output=True, check=True).stdout.decode()

    @tool
    def start_child() -> int:
        """Start a process that goes on for itself."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    @tool
    def start_child_and_hang(file: str) -> int:
        """Start a process and never end."""
        child = subprocess.Popen(["sleep", "600"])
        with open(file, "w") as stream:
            stream.write(f"{child.pid}\\n")
        time.sleep(600)

    @tool
    def start_session() -> int:
        """Start a process in a session of its own, as browsers are started."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    @tool
    def fork() -> int:
        """Fork this very process and let both go on."""
        child = os.fork()
        if child == 0:
            time.sleep(600)
        return child

    @tool
    def forge() -> str:
        """Write answers of its own to every pipe of the process."""
        for number in range(3, 20):
            try:
                os.write(number, b'{"type":"answer","content":"forged","number":1}\\n' * 2)
            except OSError:
                pass
        return "done"

    @tool
    def split() -> str:
        """Fork this very process and let both answer."""
        return "copy" if os.fork() == 0 else "original"

    @tool
    async def wait(seconds: float) -> str:
        """Wait as async code does."""
        await asyncio.sleep(seconds)
        return "waited"

    @tool
    def task(args: ToolArgs) -> str:
        """Tell the task."""
        return args.metadata["name"]
    '''
REWARDS = """
    import os, time

    @reward(timeout=0.3)
    def hang(args, messages):
        time.sleep(600)

    @reward
    def crash(args, messages):
        os._exit(4)

    @reward
    def fail(args, messages):
        raise KeyError("lamp")

    @reward
    def nan(args, messages):
        return float("nan")
    """


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return write_tools(tmp_path, TOOLS)


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    return write_tools(tmp_path, REWARDS, name="rewards.py")


def pool_of(tools: Path | None, rewards: Path | None = None, **options: Any) -> UserPool:
    return UserPool(
        tools_file=tools and read_user_file(tools),
        rewards_file=rewards and read_user_file(rewards),
        **options,
    )


async def call(pool: UserPool, name: str, **arguments: Any) -> ToolResult:
    return await pool.call(name, arguments, metadata={"name": "task 7"})


def results_of(pool: UserPool, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    """The results of calls that follow one another."""

    async def main() -> list[ToolResult]:
        async with pool:
            return [await call(pool, name, **arguments) for name, arguments in calls]

    return run_async(main)


def test_a_tool_answers_with_its_arguments_converted(tools: Path) -> None:
    results = results_of(
        pool_of(tools),
        ("echo", {"text": "ab", "count": "2"}),
        ("echo", {"text": "ü\n\0\u2028"}),
        ("wait", {"seconds": 0.001}),
        ("task", {}),
        ("echo", {"count": 1}),
    )

    assert [result.content for result in results[:4]] == ["abab", "ü\n\0\u2028", "waited", "task 7"]
    assert not any(result.is_error for result in results[:4])
    assert results[4].is_error
    assert results[4].content == "error: wrong arguments: text: Field required"


def test_one_process_serves_calls_that_follow_one_another(tools: Path) -> None:
    one, bad, other = results_of(pool_of(tools), ("pid", {}), ("leave", {}), ("pid", {}))

    assert one == other
    assert int(one.content) != os.getpid()
    assert bad == ToolResult(content="error: SystemExit: 3", is_error=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("crash", "exited"),
        ("segfault", "exited"),
        ("hang", "timed out after 0.3 s"),
        ("spin", "timed out after 1 s"),
    ],
)
def test_a_process_that_crashes_or_hangs_is_replaced(tools: Path, name: str, text: str) -> None:
    pool = pool_of(tools, tool_timeout_s=1.0)
    one, broken, other = results_of(pool, ("pid", {}), (name, {}), ("pid", {}))

    assert broken.is_error
    assert broken.content.startswith(f"error: {name} ")
    assert text in broken.content
    assert one.content != other.content
    assert not is_alive(int(one.content))


def test_a_new_process_runs_the_code_that_the_run_began_with(tools: Path) -> None:
    def edit() -> None:
        tools.write_text("this is no Python any more", encoding="utf-8")

    async def main() -> None:
        async with pool_of(tools) as pool:
            edit()
            await pool.call("crash", {}, metadata={})
            answer = await pool.call("echo", {"text": "as before"}, metadata={})

        assert answer.content == "as before"

    run_async(main)


def test_nothing_a_tool_prints_gets_into_its_answer(
    tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed, after = results_of(pool_of(tools), ("chatter", {}), ("echo", {"text": "a"}))

    assert (printed.content, after.content) == ("done", "a")
    out, err = capfd.readouterr()
    assert out == ""
    assert all(letter * 300_000 in err for letter in "pewc")


def test_an_answer_that_a_tool_forges_is_not_taken_for_that_of_the_next_call(tools: Path) -> None:
    _, next_call, after = results_of(
        pool_of(tools), ("forge", {}), ("pid", {}), ("echo", {"text": "a"})
    )

    assert next_call.content == (
        "error: pid crashed (its process sent something other than the result of this call)"
    )
    assert after.content == "a"


def test_a_copy_that_a_tool_forks_off_answers_no_call(tools: Path) -> None:
    split, *pids = results_of(pool_of(tools), ("split", {}), *[("pid", {})] * 20)

    assert split.content == "original"
    assert len({pid.content for pid in pids}) == 1


def test_many_calls_at_once_have_one_answer_each_though_some_end_their_process(
    tools: Path,
) -> None:
    seen: dict[int, str] = {}

    async def main() -> None:
        async with pool_of(tools, tool_timeout_s=5) as pool:

            async def ask(which: int) -> None:
                name = {30: "crash", 40: "hang"}.get(which)
                reply = call(pool, name) if name else call(pool, "echo", text=str(which))
                seen[which] = (await reply).content

            async with anyio.create_task_group() as group:
                for which in range(60):
                    group.start_soon(ask, which)

    run_async(main)
    assert "crashed" in seen.pop(30)
    assert "timed out" in seen.pop(40)
    assert seen == {which: str(which) for which in range(60) if which not in (30, 40)}


def test_a_call_cancelled_while_it_waits_costs_no_process(tools: Path) -> None:
    async def main() -> None:
        async with pool_of(tools, max_workers=1) as pool, anyio.create_task_group() as group:
            first = await call(pool, "pid")
            group.start_soon(lambda: call(pool, "wait", seconds=0.2))
            await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(0.01) as scope:
                await call(pool, "pid")
            assert scope.cancelled_caught
            assert await call(pool, "pid") == first

    run_async(main)


def test_a_process_that_ends_between_calls_is_replaced(tools: Path) -> None:
    async def main() -> None:
        async with pool_of(tools) as pool:
            os.kill(int((await call(pool, "pid")).content), signal.SIGKILL)
            [worker] = pool._workers
            await wait_for(lambda: worker.has_ended)
            assert (await call(pool, "echo", text="a")).content == "a"

    run_async(main)


def test_megabytes_are_cut(tools: Path) -> None:
    flooded, after = results_of(pool_of(tools), ("flood", {}), ("echo", {"text": "a"}))

    assert flooded.content.startswith("x" * 1_000_000)
    assert flooded.content.endswith("… (cut; 5000000 characters in all)")
    assert len(flooded.content) < 1_000_100
    assert after.content == "a"


def test_a_command_of_a_tool_does_not_read_the_calls(tools: Path) -> None:
    pool = pool_of(tools, tool_timeout_s=5)

    read, after = results_of(pool, ("read_stdin", {}), ("echo", {"text": "a"}))

    assert (read.content, after.content) == ("", "a")


def test_slow_calls_make_the_pool_grow_and_each_gets_a_process(tools: Path, tmp_path: Path) -> None:
    names = [f"here-{index}" for index in range(3)]
    done: list[ToolResult] = []

    async def main() -> int:
        async with pool_of(tools, max_workers=3) as pool:

            async def meet(name: str) -> None:
                # Ends only if all three run at the same time.
                done.append(await call(pool, "meet", folder=str(tmp_path), me=name, others=names))

            async with anyio.create_task_group() as group:
                for name in names:
                    group.start_soon(meet, name)
            return len(child_pids())

    before = child_pids()
    assert run_async(main) - len(before) == 3
    assert [result.content for result in done] == ["true"] * 3


def test_the_pool_does_not_grow_beyond_its_limit(tools: Path) -> None:
    async def main() -> set[str]:
        seen: set[str] = set()
        async with pool_of(tools, max_workers=2) as pool:

            async def ask() -> None:
                await call(pool, "wait", seconds=0.1)
                seen.add((await call(pool, "pid")).content)

            async with anyio.create_task_group() as group:
                for _ in range(6):
                    group.start_soon(ask)
        return seen

    assert 1 <= len(run_async(main)) <= 2


@pytest.mark.parametrize("starter", ["start_child", "start_session", "fork"])
def test_nothing_a_tool_started_is_left_when_the_pool_ends(tools: Path, starter: str) -> None:
    before = child_pids()

    worker, child = results_of(pool_of(tools), ("pid", {}), (starter, {}))

    for result in (worker, child):
        run_async(wait_for_end, int(result.content))
    assert child_pids() <= before


def test_what_a_hung_tool_started_ends_with_it(tools: Path, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    file.touch()

    async def main() -> None:
        async with pool_of(tools) as pool:
            async with anyio.create_task_group() as group:
                group.start_soon(hang, pool)
                await wait_for(lambda: file.read_bytes().endswith(b"\n"))
                group.cancel_scope.cancel()
            await wait_for_end(int(file.read_bytes()))
            assert (await call(pool, "echo", text="a")).content == "a"

    async def hang(pool: UserPool) -> None:
        await call(pool, "start_child_and_hang", file=str(file))

    run_async(main)


def test_a_pool_cancelled_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    slow = write_tools(tmp_path, "import time\ntime.sleep(600)\n")
    before = child_pids()

    async def main() -> None:
        with anyio.move_on_after(0.3):
            async with pool_of(slow):
                raise AssertionError("a file that never loads was loaded")

    run_async(main)
    assert child_pids() <= before


def test_a_worker_ends_itself_when_its_parent_is_killed(tools: Path) -> None:
    code = (
        "import anyio, pathlib, sys\n"
        "from stillroom.tools.user.file import read_user_file\n"
        "from stillroom.tools.user.pool import UserPool\n"
        "async def main():\n"
        "    tools = read_user_file(pathlib.Path(sys.argv[1]))\n"
        "    async with UserPool(tools_file=tools, rewards_file=None) as pool:\n"
        "        for name in ('pid', 'start_child', 'start_session'):\n"
        "            print((await pool.call(name, {}, metadata={})).content, flush=True)\n"
        "        await pool.call('spin', {}, metadata={})\n"
        "anyio.run(main)\n"
    )
    command = [sys.executable, "-c", code, str(tools)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(3)]
        assert all(map(is_alive, pids))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=60)

    for pid in pids:
        run_async(wait_for_end, pid)


def reward_of(pool: UserPool, name: str) -> float:
    async def main() -> float:
        async with pool:
            messages: Any = [user("please"), assistant("7")]
            return await pool.reward(name, messages, metadata={"m": 0.5}, variables={"v": 2})

    return run_async(main)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hang", "reward hang timed out after 0.3 s"),
        ("crash", "reward crash crashed (its process exited"),
        ("fail", "reward fail: KeyError: 'lamp'"),
        ("nan", "reward nan: a reward must return a finite number"),
    ],
)
def test_a_reward_that_cannot_be_computed_is_a_failure_and_no_number(
    rewards: Path, name: str, message: str
) -> None:
    with pytest.raises(CallFailedError) as caught:
        reward_of(pool_of(None, rewards), name)
    is_late = name == "hang"
    assert caught.value.kind is (FailureClass.REWARD_TIMEOUT if is_late else FailureClass.REWARD)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("1 / 0\n", r"tools\.py:2: loading failed: ZeroDivisionError"),
        ("import os\nos._exit(0)\n", "failed to start: its process exited"),
        ("raise SystemExit('no licence')\n", "failed to start: its process exited"),
        ('class Lamp: ...\n@tool\ndef f(x: Lamp): "Do."\n', "'f' has a type for parameter 'x'"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_before_any_call(
    tmp_path: Path, code: str, problem: str
) -> None:
    before = child_pids()

    with pytest.raises(ToolFileError, match=problem):
        results_of(pool_of(write_tools(tmp_path, code)))
    assert child_pids() <= before


def test_the_users_folder_does_not_hide_our_modules(tmp_path: Path) -> None:
    for name in ("stillroom", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n", "utf-8")
    (tmp_path / "prices.py").write_text("LAMP = 7\n", "utf-8")
    code = 'import prices\n\n@tool\ndef lamp() -> int:\n    """Price."""\n    return prices.LAMP\n'

    [result] = results_of(pool_of(write_tools(tmp_path, code)), ("lamp", {}))

    assert result.content == "7"


def test_a_file_named_relative_to_here_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    write_tools(tmp_path / "mine", TOOLS)
    monkeypatch.chdir(tmp_path)

    [result] = results_of(pool_of(Path("mine/tools.py")), ("echo", {"text": "a"}))

    assert result.content == "a"

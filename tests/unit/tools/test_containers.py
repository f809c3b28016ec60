"""Containers as tools, with a fake engine whose containers are processes."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from fakes.docker_cli import FakeDocker, install_docker
from fakes.tool_sources import DictTools
from fakes.user_files import is_alive, wait_for, wait_for_end
from fakes.waiting import run_async
from stillroom.errors import CallFailedError, EngineError, FailureClass, InputError
from stillroom.tools.containers import DockerTools
from stillroom.tools.source import ToolTask

SHOP = ToolTask({}, docker="local/shop", docker_env={"LAMP": "red"})


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    (tmp_path / "Dockerfile.shop").write_text("FROM shop\n", "utf-8")
    fake = install_docker(tmp_path / "engine")
    monkeypatch.setenv("PATH", f"{tmp_path / 'engine' / 'bin'}:/usr/bin:/bin")
    return fake


@pytest.fixture
def no_engine(engine: FakeDocker) -> None:
    (engine.folder / "no-engine").touch()


def tools_in(folder: Path, *tasks: ToolTask, **options: Any) -> DockerTools:
    return DockerTools(tasks, folder=folder, run_id="run-7", **options)


def test_a_rollout_has_a_container_of_its_own_and_it_is_removed(
    tmp_path: Path, engine: FakeDocker
) -> None:
    async def main() -> None:
        async with tools_in(tmp_path, SHOP) as tools:
            assert engine.containers() == []
            async with tools.session(SHOP) as one, tools.session(SHOP) as other:
                assert engine.containers() == []
                assert (await one.call("count", {})).content == "1"
                assert (await one.call("count", {})).content == "2"
                assert (await other.call("count", {})).content == "1"
                assert (await one.call("environ", {"name": "LAMP"})).content.startswith("red in ")
                assert len(engine.containers()) == 2
                pids = engine.pids()
            assert engine.containers() == []
            for pid in pids:
                await wait_for_end(pid)

    run_async(main)
    [build] = engine.calls("build")
    assert build[build.index("--file") + 1] == str(tmp_path / "Dockerfile.shop")
    # One to see the tools, and one for each rollout.
    assert len(engine.calls("run")) == 3
    run = engine.calls("run")[-1]
    assert run[-1] == build[build.index("--tag") + 1]
    assert run[-1].startswith("stillroom-local/shop-")
    assert run[run.index("--publish") + 1] == "127.0.0.1::8931"


def test_a_task_is_offered_the_tools_of_its_own_container(
    tmp_path: Path, engine: FakeDocker
) -> None:
    plain = ToolTask({})

    async def main() -> None:
        async with tools_in(tmp_path, plain, SHOP) as tools:
            assert tools.keeps_state
            assert tools.schemas[0]["function"]["name"] == "nested"
            assert tools.schemas_for(SHOP) == tools.schemas
            assert tools.schemas_for(plain) == []
            async with tools.session(plain) as session:
                result = await session.call("count", {})
            assert result.is_error
            assert "no container" in result.content

    run_async(main)


def test_a_container_whose_server_hangs_is_replaced(tmp_path: Path, engine: FakeDocker) -> None:
    async def main() -> None:
        async with (
            tools_in(tmp_path, SHOP, tool_timeout_s=3) as tools,
            tools.session(SHOP) as session,
        ):
            assert (await session.call("count", {})).content == "1"
            [pid] = engine.pids()
            hung = await session.call("hang", {})
            assert hung.content.startswith("error: hang: timed out after 3 s.")
            assert not is_alive(pid)
            assert (await session.call("count", {})).content == "1"

    run_async(main)
    assert engine.containers() == []


def test_cancelling_a_rollout_removes_its_container(tmp_path: Path, engine: FakeDocker) -> None:
    started = tmp_path / "started"

    async def rollout(tools: DockerTools) -> None:
        async with tools.session(SHOP) as session:
            await session.call("hang", {"file": str(started)})

    async def main() -> None:
        async with tools_in(tmp_path, SHOP) as tools, anyio.create_task_group() as group:
            group.start_soon(rollout, tools)
            await wait_for(started.exists)
            group.cancel_scope.cancel()
        assert engine.containers() == []

    run_async(main)


def test_what_a_killed_run_left_is_removed_at_its_next_start(
    tmp_path: Path, engine: FakeDocker
) -> None:
    for name, label in (("mine", "stillroom.run=run-7"), ("other", "stillroom.run=run-70")):
        (engine.folder / f"{name}.labels").write_text(label, "utf-8")
        (engine.folder / f"{name}.pid").write_text("999999999", "utf-8")

    async def main() -> None:
        async with tools_in(tmp_path, SHOP):
            assert engine.containers() == ["other"]

    run_async(main)


def test_no_more_containers_run_than_allowed(tmp_path: Path, engine: FakeDocker) -> None:
    most = 0

    async def rollout(tools: DockerTools) -> None:
        nonlocal most
        async with tools.session(SHOP) as session:
            await session.call("count", {})
            most = max(most, len(engine.containers()))

    async def main() -> None:
        async with (
            tools_in(tmp_path, SHOP, max_containers=1) as tools,
            anyio.create_task_group() as group,
        ):
            for _ in range(3):
                group.start_soon(rollout, tools)

    run_async(main)
    assert most == 1


def test_a_container_that_stops_is_an_error_with_its_log_before_any_rollout(
    tmp_path: Path, engine: FakeDocker
) -> None:
    async def main() -> None:
        async with tools_in(tmp_path, ToolTask({}, docker="dies:1")):
            raise AssertionError("opened")

    with pytest.raises(InputError, match=r"'dies:1'(.|\n)*no licence found") as caught:
        run_async(main)
    assert "8931" in caught.value.fix
    assert engine.containers() == []


def test_a_container_that_does_not_start_fails_its_rollout_only(
    tmp_path: Path, engine: FakeDocker
) -> None:
    async def main() -> None:
        async with tools_in(tmp_path, SHOP) as tools, tools.session(SHOP) as session:
            (engine.folder / "refuse").touch()
            with pytest.raises(CallFailedError, match="no space left on device") as caught:
                await session.call("count", {})
            assert caught.value.kind is FailureClass.TOOL_HOST

    run_async(main)
    assert engine.containers() == []


@pytest.mark.parametrize(
    ("docker", "problem"),
    [
        ("local/none", "Dockerfile.none, which does not exist"),
        ("local/../shop", "which does not exist"),
        ("local/broken", "could not be built"),
        ("absent:1", "'absent:1' is not present locally and cannot be pulled"),
    ],
)
def test_an_image_that_cannot_be_had_is_an_error_before_any_rollout(
    tmp_path: Path, engine: FakeDocker, docker: str, problem: str
) -> None:
    (tmp_path / "Dockerfile.broken").touch()

    async def main() -> None:
        async with tools_in(tmp_path, ToolTask({}, docker=docker)):
            raise AssertionError("opened")

    with pytest.raises(InputError, match=problem):
        run_async(main)
    assert engine.calls("run") == []


def test_without_an_engine_the_playwright_container_is_a_local_browser(
    tmp_path: Path, no_engine: None
) -> None:
    task = ToolTask({}, docker="local/playwright")

    async def main() -> None:
        async with tools_in(tmp_path, task, fallback=DictTools({"browse": "a page"})) as tools:
            assert [schema["function"]["name"] for schema in tools.schemas] == ["browse"]
            assert tools.schemas_for(task) == tools.schemas
            async with tools.session(task) as session:
                assert (await session.call("browse", {})).content == "a page"
            [note] = tools.notes
            assert "'local/playwright' was replaced with a browser on this machine" in note
            assert "the same tool names (browse)" in note

    run_async(main)


@pytest.mark.parametrize("docker", ["local/shop", "local/playwright"])
def test_without_an_engine_and_a_replacement_the_image_is_named(
    tmp_path: Path, no_engine: None, docker: str
) -> None:
    # Only for the browser is there a replacement.
    fallback = None if docker == "local/playwright" else DictTools({"browse": "a page"})

    async def main() -> None:
        async with tools_in(tmp_path, ToolTask({}, docker=docker), fallback=fallback):
            raise AssertionError("opened")

    with pytest.raises(EngineError, match=f"docker: '{docker}', .*: Cannot connect to the daemon"):
        run_async(main)


def test_tasks_without_containers_need_no_engine(tmp_path: Path, no_engine: None) -> None:
    async def main() -> None:
        async with tools_in(tmp_path, ToolTask({})) as tools:
            assert (tools.schemas, tools.notes) == ([], [])

    run_async(main)

"""Runs as processes: started, seen from elsewhere, killed, cancelled, adopted."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project, read_rows, rollouts_request
from fakes.started_runs import asked_long_ago
from fakes.user_files import suspend
from fakes.waiting import wait_until
from stillroom import api
from stillroom.errors import InputError, RunError
from stillroom.jobs import supervise
from stillroom.run_folder import RunFolder, create_run, find_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus


def start_rollouts(workspace: Workspace, endpoint: ScriptedEndpoint, **more) -> api.RunReport:
    request = rollouts_request(endpoint, concurrency=4, max_concurrency=4, **more)
    return api.generate_rollouts(workspace, request)


def status_of(workspace: Workspace, run_id: str) -> str:
    return api.get_run(workspace, api.GetRun(run_id=run_id)).status


def wait_for_end(workspace: Workspace, run_id: str) -> api.RunReport:
    wait_until(lambda: status_of(workspace, run_id) not in ("starting", "running"))
    return api.get_run(workspace, api.GetRun(run_id=run_id))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(endpoint_project(tmp_path, num_prompts=12))


def test_a_killed_run_is_interrupted_and_the_same_request_pays_for_no_finished_call_again(
    workspace: Workspace,
) -> None:
    with ScriptedEndpoint(tool_turns=3, latency_s=0.01) as endpoint:
        first = start_rollouts(workspace, endpoint)
        wait_until(lambda: sum(endpoint.served.values()) >= 15)
        endpoint.hold.clear()
        pid = find_run(workspace, first.run_id).read().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: status_of(workspace, first.run_id) == "interrupted")
        journalled = (workspace.root / "rollouts/.out.jsonl/journal.jsonl").read_bytes()
        recorded_turns = journalled.count(b'"type":"turn"')
        served_before = endpoint.served.copy()
        endpoint.hold.set()
        second = wait_for_end(workspace, start_rollouts(workspace, endpoint).run_id)
        repeated = sum(max(0, count - 1) for count in endpoint.served.values())
    assert second.status == "succeeded", second.error
    result = second.result
    assert result is not None
    assert result["succeeded"] == 12
    # Only calls that were on the way when the process died may be made twice.
    assert repeated <= 4
    assert result["calls"] == 12 * 4 - recorded_turns
    assert sum(served_before.values()) >= recorded_turns
    rows = read_rows(workspace.root / "rollouts/out.jsonl")
    assert len({(row["task_id"], row["sample"]) for row in rows}) == len(rows) == 12
    error = api.get_run(workspace, api.GetRun(run_id=first.run_id)).error
    assert error is not None
    assert "exited before finishing" in error.problem


def test_a_cancelled_run_keeps_its_rows_and_leaves_no_process(workspace: Workspace) -> None:
    with ScriptedEndpoint(tool_turns=1, latency_s=0.05) as endpoint:
        run = start_rollouts(workspace, endpoint)
        wait_until(lambda: sum(endpoint.served.values()) >= 4)
        pid = find_run(workspace, run.run_id).read().pid
        assert pid is not None
        children = psutil.Process(pid).children(recursive=True)
        api.cancel_run(workspace, api.CancelRun(run_id=run.run_id))
        ended = wait_for_end(workspace, run.run_id)
        assert ended.status == "cancelled"
        wait_until(lambda: not any(child.is_running() for child in children))
        again = wait_for_end(workspace, start_rollouts(workspace, endpoint).run_id)
    assert again.status == "succeeded"
    assert len(read_rows(workspace.root / "rollouts/out.jsonl")) == 12


@pytest.mark.parametrize("step_s", [3.0, -3600.0])
def test_a_run_is_killed_although_the_clock_was_set(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    with ScriptedEndpoint() as endpoint:
        endpoint.hold.clear()
        run = start_rollouts(workspace, endpoint)
        folder = find_run(workspace, run.run_id)
        wait_until(lambda: folder.read().status is RunStatus.RUNNING)
        suspend(folder.read().pid or 0)
        begun, now = psutil.Process.create_time, time.time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: begun(self) + step_s)
        monkeypatch.setattr(time, "time", lambda: now() + step_s)
        assert supervise.cancel_run(folder).status is RunStatus.RUNNING
        # A clock that was set forward makes no cancel old.
        assert supervise.cancel_run(folder).status is RunStatus.RUNNING
        asked_long_ago(folder)
        assert supervise.cancel_run(folder).status is RunStatus.CANCELLED


def test_a_pid_that_belongs_to_another_program_now_is_never_signalled(
    workspace: Workspace,
) -> None:
    folder = create_run(workspace, RunKind.ROLLOUTS, {})
    bystander = psutil.Popen(["sleep", "60"])
    try:
        state = msgspec.structs.replace(
            folder.read(), status=RunStatus.RUNNING, pid=bystander.pid, process_start="earlier"
        )
        folder.write(state)
        # Somebody holds the lock, so the run seems alive, but the pid's start time is not its own.
        lock = folder.owner_lock()
        assert lock.try_acquire()
        supervise.cancel_run(folder)
        asked_long_ago(folder)
        supervise.cancel_run(folder)
        assert bystander.is_running()
        assert bystander.status() != psutil.STATUS_ZOMBIE
        lock.release()
    finally:
        bystander.kill()
        bystander.wait(10)


def test_only_one_of_many_takes_a_run_over(workspace: Workspace) -> None:
    folder = create_run(workspace, RunKind.ROLLOUTS, {})
    for _ in range(50):
        locks = [RunFolder(folder.path).owner_lock() for _ in range(8)]
        start = threading.Barrier(len(locks))

        def race(lock, start=start) -> bool:
            start.wait(5)
            return lock.try_acquire()

        with ThreadPoolExecutor(len(locks)) as pool:
            won = list(pool.map(race, locks))
        assert sum(won) == 1
        for lock in locks:
            lock.release()


def test_a_second_process_for_the_same_run_gives_up(workspace: Workspace) -> None:
    folder = create_run(workspace, RunKind.ROLLOUTS, {})
    lock = folder.owner_lock()
    assert lock.try_acquire()
    before = folder.read()
    process = psutil.Popen(
        [*worker_command(), str(folder.path)], stderr=-3, stdout=-3, cwd=workspace.root
    )
    assert process.wait(30) == 2
    assert folder.read() == before
    lock.release()


def worker_command() -> list[str]:
    return [sys.executable, "-P", "-m", "stillroom.api.worker"]


def test_a_worker_that_dies_before_it_begins_is_not_running_for_ever(
    workspace: Workspace,
) -> None:
    folder = create_run(workspace, RunKind.ROLLOUTS, {})
    long_ago = folder.path.stat().st_mtime - 120
    os.utime(folder.path / "request.json", (long_ago, long_ago))
    state = supervise.read_run(folder)
    assert state.status is RunStatus.INTERRUPTED
    assert state.error is not None
    assert "exited before it started" in state.error.problem


def test_a_run_is_found_by_the_beginning_of_its_id(workspace: Workspace) -> None:
    one = create_run(workspace, RunKind.SFT, {})
    assert find_run(workspace, one.run_id[:8]).run_id == one.run_id
    two = create_run(workspace, RunKind.SFT, {})
    with pytest.raises(RunError, match="matches several runs"):
        find_run(workspace, "sft-")
    assert find_run(workspace, two.run_id).run_id == two.run_id
    with pytest.raises(RunError, match="there is no run"):
        find_run(workspace, "dpo-")


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden"])
def test_a_run_id_is_never_a_path(workspace: Workspace, run_id: str) -> None:
    with pytest.raises(InputError, match="is not a run id"):
        find_run(workspace, run_id)

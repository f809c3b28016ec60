"""What is left of a run whose process ends: no process, a bounded log, and why it ended."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fakes.folders import MAY_MOUNT, small_disk
from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project, rollouts_request
from fakes.user_files import is_alive
from fakes.waiting import wait_until
from stillroom import api
from stillroom.jobs import supervise
from stillroom.jobs.failures import KILLED_AT_LIMIT, outcome_of_dead_process, resume_hint
from stillroom.jobs.keeper import BoundedLog
from stillroom.models.resolve import CHECKPOINTS
from stillroom.processes import process_start
from stillroom.run_folder import ProcessEnd, RunFolder, create_run, find_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus

# It starts one process that hides from everything but its parent, and then never lets go of the
# interpreter.
HOLDING_TOOL = """
import os, subprocess, sys
from stillroom.tools import tool

def note(pid):
    with open(os.environ["STILLROOM_PIDS_FILE"], "a") as stream:
        stream.write(f"{pid}\\n")

@tool
def echo(text: str) -> str:
    "Say the text again."
    note(os.getpid())
    program = (
        "import subprocess as s;"
        "print(s.Popen(['sleep', '600'], start_new_session=True, stdout=-3).pid)"
    )
    command = [sys.executable, "-c", program]
    note(subprocess.run(command, env={}, stdout=-1, text=True).stdout.strip())
    sum(range(10**13))
    return text
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(endpoint_project(tmp_path, num_prompts=2))


def start(workspace: Workspace, endpoint: ScriptedEndpoint) -> RunFolder:
    request = rollouts_request(endpoint, concurrency=2)
    return find_run(workspace, api.generate_rollouts(workspace, request).run_id)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a mark finds it")
def test_nothing_outlives_a_killed_run_whose_tool_holds_the_interpreter(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids_file = workspace.root / "pids"
    monkeypatch.setenv("STILLROOM_PIDS_FILE", str(pids_file))
    (workspace.root / "tools.py").write_text(HOLDING_TOOL, encoding="utf-8")

    def pids() -> list[int]:
        return [int(line) for line in pids_file.read_text().split()] if pids_file.exists() else []

    with ScriptedEndpoint(tool_turns=1) as endpoint:
        folder = start(workspace, endpoint)
        wait_until(lambda: len(pids()) == 4)
        assert all(map(is_alive, pids()))
        os.kill(folder.read().pid or 0, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids())))
        wait_until(lambda: supervise.read_run(folder).status is RunStatus.INTERRUPTED)
    error = folder.read().error
    assert error is not None
    assert "exited before finishing (killed by SIGKILL)" in error.problem
    assert "memory" not in error.problem


def test_a_run_that_is_cancelled_at_once_is_cancelled(workspace: Workspace) -> None:
    with ScriptedEndpoint(tool_turns=1) as endpoint:
        endpoint.hold.clear()
        folder = start(workspace, endpoint)
        report = api.cancel_run(workspace, api.CancelRun(run_id=folder.run_id))
        request = api.GetRun(run_id=folder.run_id)
        wait_until(lambda: api.get_run(workspace, request).status not in ("starting", "running"))
        report = api.get_run(workspace, request)
    assert (report.status, report.error) == ("cancelled", None)


def test_a_run_that_dies_after_a_cancel_is_cancelled(workspace: Workspace) -> None:
    folder = create_run(workspace, RunKind.ROLLOUTS, {})
    folder.ask_to_cancel()
    long_ago = folder.path.stat().st_mtime - 120
    os.utime(folder.request_file, (long_ago, long_ago))
    assert api.get_run(workspace, api.GetRun(run_id=folder.run_id)).status == "cancelled"


def test_the_wish_alone_stops_a_run(workspace: Workspace) -> None:
    with ScriptedEndpoint(tool_turns=1) as endpoint:
        endpoint.hold.clear()
        folder = start(workspace, endpoint)
        wait_until(lambda: folder.read().status is RunStatus.RUNNING)
        wait_until(lambda: endpoint.num_asked > 0)
        folder.cancel_mark.touch()
        wait_until(lambda: folder.read().status is RunStatus.CANCELLED)


def test_out_of_memory_is_said_only_if_the_kernel_has_killed(workspace: Workspace) -> None:
    folder = create_run(workspace, RunKind.SFT, {})
    killed = ProcessEnd(signal=9, memory_bytes=12_300_000_000)
    status, failure = outcome_of_dead_process(folder, folder.read(), killed)
    assert status is RunStatus.INTERRUPTED
    assert "of memory" not in failure.problem
    assert "for memory" not in failure.fix

    (folder.path / "ended.json").write_text(
        json.dumps({"signal": 9, "memory_bytes": 12_300_000_000, "out_of_memory": True})
    )
    status, failure = outcome_of_dead_process(folder, folder.read(), folder.read_process_end())
    assert status is RunStatus.FAILED
    assert failure.problem.startswith("out of memory: ")
    assert "12.3 GB" in failure.problem


def test_a_resumed_run_that_broke_off_early_goes_on_from_the_checkpoint_before(
    workspace: Workspace,
) -> None:
    first = create_run(workspace, RunKind.SFT, {})
    second = create_run(workspace, RunKind.SFT, {"resume": first.run_id})
    # With early_stop the second run begins with a copy of the best checkpoint.
    for run, step in ((first, "step_000003"), (second, "step_000002")):
        state = run.path / CHECKPOINTS / step / "training_state.json"
        state.parent.mkdir(parents=True)
        state.touch()
    third = create_run(workspace, RunKind.SFT, {"resume": second.run_id})
    again = f"; then start_training(resume={third.run_id}) resumes at step_000003"
    assert resume_hint(third, RunKind.SFT) == f"{again} of {first.run_id}"
    assert resume_hint(create_run(workspace, RunKind.SFT, {}), RunKind.SFT) == ""


def test_a_run_that_was_killed_at_a_limit_goes_on_with_a_higher_one(workspace: Workspace) -> None:
    folder = create_run(workspace, RunKind.SFT, {})
    folder.log.write_text(f"{KILLED_AT_LIMIT}its budget of $1 is spent\n")
    _, failure = outcome_of_dead_process(
        folder, folder.read(), ProcessEnd(signal=9, memory_bytes=0)
    )
    assert "its budget of $1 is spent" in failure.problem
    assert failure.fix.startswith("raise the limit that the log names")


@pytest.mark.parametrize("kills", [0, 1])
def test_a_run_that_the_kernel_kills_for_memory_says_so(workspace: Workspace, kills: int) -> None:
    counter = workspace.root / "memory.events"
    counter.write_text("low 3\noom_kill 4\n")
    program = (
        "import sys, pathlib, stillroom.jobs.keeper as keeper;"
        f"keeper._oom_counters = lambda: [(pathlib.Path({str(counter)!r}), 'oom_kill')];"
        "sys.exit(keeper.main(sys.argv[1:]))"
    )
    with ScriptedEndpoint() as endpoint:
        endpoint.hold.clear()
        request = api.GenerateRollouts(
            input="prompts.jsonl", output="out.jsonl", base_url=endpoint.base_url, model="scripted"
        )
        folder = create_run(workspace, RunKind.ROLLOUTS, request.model_dump(mode="json"))
        command = [sys.executable, "-P", "-c", program, str(folder.path)]
        keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_until(lambda: endpoint.num_asked > 0)
        counter.write_text(f"low 3\noom_kill {4 + kills}\n")
        os.kill(folder.read().pid or 0, signal.SIGKILL)
        assert keeper.wait(15) == 128 + signal.SIGKILL
    state = supervise.read_run(folder)
    assert state.error is not None
    if kills:
        assert state.status is RunStatus.FAILED
        assert state.error.problem.startswith(
            "out of memory: the operating system killed the run's process"
        )
    else:
        assert state.status is RunStatus.INTERRUPTED
        assert "out of memory" not in state.error.problem


def test_a_log_keeps_its_beginning_and_its_end_and_counts_what_it_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    log = BoundedLog(path, max_bytes=80_000)
    log.write(b"the beginning\n")
    for number in range(50_000):
        log.write(f"line {number}\n".encode())
        assert path.stat().st_size <= 81_000
    log.close()
    text = path.read_text()
    assert text.startswith("the beginning\nline 0\n")
    assert text.endswith("line 49999\n")
    total = len("the beginning\n") + sum(len(f"line {number}\n") for number in range(50_000))
    note = next(line for line in text.splitlines() if "omitted" in line)
    assert text.count("omitted") == 1
    left_out = int(note.removeprefix("[").split()[0])
    assert left_out == total - (len(text) - len(note) - 2)


def test_a_process_with_the_pid_of_another_is_told_from_it() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start_of_sleeper = process_start(sleeper.pid)
    try:
        assert start_of_sleeper is not None
        time.sleep(0.05)
        assert process_start(sleeper.pid) == start_of_sleeper != process_start(os.getpid())
    finally:
        sleeper.kill()
    wait_until(lambda: process_start(sleeper.pid) is None)
    sleeper.wait(10)


def test_a_run_without_a_single_success_has_failed(workspace: Workspace) -> None:
    with ScriptedEndpoint(status=400) as endpoint:
        folder = start(workspace, endpoint)
        wait_until(lambda: folder.read().status.is_final)
    state = folder.read()
    assert state.status is RunStatus.FAILED
    assert state.error is not None
    said = "none of 2 rollouts succeeded: 2 failed with bad_request; the last failure: HTTP 400"
    assert state.error.problem.startswith(said)
    assert "failures.jsonl" in state.error.fix
    assert state.result is not None
    assert state.result["failed"] == 2


@MAY_MOUNT
def test_a_run_whose_disk_is_full_has_failed_for_that(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 1):
        workspace = Workspace(endpoint_project(disk, num_prompts=2))
        with ScriptedEndpoint(tool_turns=1) as endpoint:
            endpoint.hold.clear()
            folder = start(workspace, endpoint)
            wait_until(lambda: endpoint.num_asked > 0)
            with suppress(OSError), (disk / "filler").open("wb", buffering=0) as stream:
                while stream.write(bytes(512)):
                    pass
            endpoint.hold.set()
            request = api.GetRun(run_id=folder.run_id)
            wait_until(lambda: api.get_run(workspace, request).status == "failed")
        error = api.get_run(workspace, request).error
        assert error is not None
        assert "no space left on the disk" in error.problem

"""Rollout runs split over a real local Ray cluster of two workers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fakes.http_endpoint import ScriptedEndpoint
from fakes.ray_marks import RAY_MARKS
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.waiting import run_async, wait_until
from stillroom import api
from stillroom.errors import RunCancelledError, RunError
from stillroom.rollout.ray.run import generate_on_ray
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import RolloutsResult
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace

pytestmark = RAY_MARKS
NUM_PROMPTS = 8
TOOLS = '''
from stillroom.tools import tool


@tool
def echo(text: str) -> str:
    """Says it again."""
    return text
'''


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    prompts = [
        {"prompt": f"prompt {index}", "metadata": {"expected_answer": 42}}
        for index in range(NUM_PROMPTS)
    ]
    write_rows(root / "prompts.jsonl", prompts)
    (root / "tools.py").write_text(TOOLS, encoding="utf-8")
    return Workspace(root)


def run_of(
    workspace: Workspace,
    endpoint: ScriptedEndpoint,
    *,
    reporter: KeptReporter | None = None,
    generate: Any = generate_on_ray,
    **changes: Any,
) -> RolloutsResult:
    given = {
        "input": "prompts.jsonl",
        "output": "out.jsonl",
        "model": "m",
        "provider": "openai",
        "base_url": endpoint.base_url,
        "tools": "tools.py",
        "concurrency": 4,
        "max_concurrency": 4,
        "seed": 7,
        "ray_address": "auto",
        "ray_workers": 2,
    }
    request = GenerateRollouts(**{**given, **changes})

    async def main() -> RolloutsResult:
        with anyio.fail_after(100):
            return await generate(
                workspace,
                request,
                folder=workspace.runs / "run",
                reporter=reporter or KeptReporter(),
            )

    return run_async(main)


def conversations(workspace: Workspace, name: str = "out.jsonl") -> dict[Any, Any]:
    rows = read_rows(workspace.root / name)
    reported = {
        (row["task_id"], row["sample"]): (row["messages"], row["reward"], row["usage"])
        for row in rows
    }
    assert len(reported) == len(rows)
    return reported


def adds_up(result: RolloutsResult) -> bool:
    return result.requested == result.succeeded + result.failed + result.omitted


def worker_pids() -> list[int]:
    """Returns the processes of this test's cluster that do a shard now."""
    pids: list[int] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ShardWorker" in " ".join(process.cmdline()):
                pids.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return pids


def left_beside(workspace: Workspace) -> list[str]:
    return sorted(path.name for path in (workspace.root / ".out.jsonl").iterdir())


def test_two_workers_do_what_one_process_does(cluster, workspace: Workspace) -> None:
    reporter = KeptReporter()
    with ScriptedEndpoint() as endpoint:
        result = run_of(workspace, endpoint, reporter=reporter, samples_per_prompt=2)
        assert set(endpoint.served.values()) == {2}
        run_of(
            workspace,
            endpoint,
            generate=generate_rollouts,
            samples_per_prompt=2,
            output="alone.jsonl",
        )

    assert adds_up(result)
    assert (result.requested, result.succeeded, result.failed) == (16, 16, 0)
    assert (result.calls, result.already_done, result.mean_reward) == (32, 0, 1.0)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (480, 160)
    assert conversations(workspace) == conversations(workspace, "alone.jsonl")
    assert reporter.progressed[-1] == (16, 16)
    assert reporter.measured[-1]["calls"] == 32
    assert left_beside(workspace) == ["lock", "settings.json", "shards.lock"]
    assert (workspace.root / "out.jsonl.manifest.json").exists()


def test_a_killed_worker_is_resumed_by_another(cluster, workspace: Workspace) -> None:
    endpoint = ScriptedEndpoint(tool_turns=2, latency_s=0.2)
    killed: list[int] = []

    def kill_one_worker() -> bool:
        if not killed and endpoint.served.total() >= 6:
            killed.extend(worker_pids()[:1])
            os.kill(killed[0], signal.SIGKILL)
        return False

    reporter = KeptReporter(kill_one_worker)
    with endpoint:
        result = run_of(workspace, endpoint, reporter=reporter)

    assert killed
    assert adds_up(result)
    assert (result.succeeded, result.failed) == (8, 0)
    assert len(conversations(workspace)) == 8
    # A call that was out when the worker was killed is made again, and no other one.
    again = {key: count for key, count in endpoint.served.items() if count != 1}
    assert len(again) <= 2
    assert set(again.values()) <= {2}
    assert 24 <= result.calls <= endpoint.served.total()
    assert any("another worker continues the shard" in note for note in reporter.notes)


def test_a_shard_whose_worker_dies_twice_has_failed(cluster, workspace: Workspace) -> None:
    endpoint = ScriptedEndpoint()
    killed: list[int] = []

    def kill_each_worker() -> bool:
        for pid in set(worker_pids()) - set(killed):
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return False

    endpoint.hold.clear()
    with endpoint:
        with pytest.raises(RunError, match="every Ray worker died"):
            run_of(workspace, endpoint, reporter=KeptReporter(kill_each_worker))
        endpoint.hold.set()
        assert len(read_rows(workspace.runs / "run" / "failures.jsonl")) == 8
        result = run_of(workspace, endpoint)
    assert (result.succeeded, result.failed) == (8, 0)


def test_cancel_stops_the_workers_and_keeps_what_is_finished(cluster, workspace: Workspace) -> None:
    endpoint = ScriptedEndpoint(tool_turns=1, latency_s=0.3)
    reporter = KeptReporter(lambda: endpoint.served.total() >= 5)
    with endpoint:
        with pytest.raises(RunCancelledError) as cancelled:
            run_of(workspace, endpoint, reporter=reporter, concurrency=2, max_concurrency=2)
        result: Any = cancelled.value.result
        assert adds_up(result)
        assert result.omitted > 0
        assert result.failed == 0
        assert len(conversations(workspace)) == result.succeeded
        rest = run_of(workspace, endpoint)
    assert (rest.succeeded, rest.already_done) == (8, result.succeeded)
    assert rest.calls + result.calls == 16
    assert worker_pids() == []


def test_a_stop_signal_is_the_runs_own_still(cluster, workspace: Workspace) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        with ScriptedEndpoint() as endpoint:
            run_of(workspace, endpoint, n=1)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def start_job(workspace: Workspace, endpoint: ScriptedEndpoint) -> api.RunReport:
    """Starts the run in a process of its own, with a cluster of its own."""
    request = api.GenerateRollouts(
        input="prompts.jsonl",
        output="out.jsonl",
        model="m",
        provider="openai",
        base_url=endpoint.base_url,
        tools="tools.py",
        concurrency=2,
        max_concurrency=2,
        seed=7,
        ray_address="local",
    )
    return api.generate_rollouts(workspace, request)


def report_of(workspace: Workspace, started: api.RunReport) -> api.RunReport:
    return api.get_run(workspace, api.GetRun(run_id=started.run_id))


def test_a_killed_driver_loses_no_finished_call(cluster, workspace: Workspace) -> None:
    with ScriptedEndpoint(latency_s=0.3) as endpoint:
        started = start_job(workspace, endpoint)
        wait_until(lambda: endpoint.served.total() >= 6)
        state = workspace.runs / started.run_id / "run.json"
        os.kill(json.loads(state.read_bytes())["pid"], signal.SIGKILL)
        wait_until(lambda: report_of(workspace, started).status == "interrupted")
        result = run_of(workspace, endpoint)

    assert (result.succeeded, result.failed) == (8, 0)
    assert len(conversations(workspace)) == 8
    # Only what was on its way when the driver and its workers were killed is asked again.
    again = {key: count for key, count in endpoint.served.items() if count != 1}
    assert len(again) <= 2
    assert set(again.values()) <= {2}

"""A run that is killed with calls on their way: what they may have cost counts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.http_endpoint import ScriptedEndpoint
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.waiting import run_async, wait_until
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import RolloutsResult
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace

# Each call writes five tokens, which is the most it may.
PRICES = "m: {input: 0, output: 100000}\n"
CALL_USD = 0.5
TESTS = Path(__file__).parents[2]
RUN = """
import sys, anyio, json
from pathlib import Path
from fakes.reporters import KeptReporter
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace

async def main():
    workspace = Workspace(Path(sys.argv[1]))
    request = GenerateRollouts(**json.loads(sys.argv[2]))
    folder, reporter = workspace.runs / "r", KeptReporter()
    await generate_rollouts(workspace, request, folder=folder, reporter=reporter)

anyio.run(main)
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"prompt {index}"} for index in range(40)])
    (tmp_path / "prices.yml").write_text(PRICES, encoding="utf-8")
    return Workspace(tmp_path)


def requested(endpoint: ScriptedEndpoint, **changes: Any) -> dict[str, Any]:
    return {
        "input": "prompts.jsonl",
        "output": "out.jsonl",
        "model": "m",
        "provider": "openai",
        "base_url": endpoint.base_url,
        "concurrency": 4,
        "max_concurrency": 4,
        "max_tokens": 5,
        **changes,
    }


def killed(workspace: Workspace, endpoint: ScriptedEndpoint, request: dict[str, Any]) -> None:
    """Kills a run of its own process while the endpoint has four of its calls."""
    command = [sys.executable, "-c", RUN, str(workspace.root), json.dumps(request)]
    run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(TESTS)})
    try:
        wait_until(lambda: endpoint.num_asked - endpoint.served.total() == 4)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait(10)


def finished(workspace: Workspace, request: dict[str, Any]) -> tuple[RolloutsResult, list[str]]:
    reporter = KeptReporter()

    async def main() -> Any:
        folder = workspace.runs / "run"
        requested = GenerateRollouts(**request)
        return await generate_rollouts(workspace, requested, folder=folder, reporter=reporter)

    return run_async(main), reporter.notes


def test_a_killed_run_and_those_after_it_keep_to_the_budget_together(workspace: Workspace) -> None:
    with ScriptedEndpoint(tool_turns=0) as endpoint:
        request = requested(endpoint, budget_usd=6.0)
        endpoint.hold_after(3)
        killed(workspace, endpoint, request)
        assert endpoint.num_asked == 7
        endpoint.hold.set()
        result, notes = finished(workspace, request)

        assert result.stopped_by == "budget_usd"
        assert endpoint.num_asked * CALL_USD <= 6.0
        # Few calls less than fit: five may have been out, as far as is on record.
        assert result.succeeded >= 6
        assert 4 <= result.lost_calls <= 5
        assert 4 * CALL_USD <= result.unconfirmed_usd <= 5 * CALL_USD
        assert "was killed with at most" in notes[0]

        asked_before = endpoint.num_asked
        result, notes = finished(workspace, request)
        assert (endpoint.num_asked, result.lost_calls, notes) == (asked_before, 0, [])


def test_a_budget_that_comes_after_the_kill_counts_what_was_out_too(workspace: Workspace) -> None:
    with ScriptedEndpoint(tool_turns=0) as endpoint:
        endpoint.hold_after(0)
        killed(workspace, endpoint, requested(endpoint))
        endpoint.hold.set()
        result, _notes = finished(workspace, requested(endpoint, max_total_tokens=10_000))

        reported = 4 * (5 + len(json.dumps({"model": "m", "messages": []})))
        assert result.lost_calls >= 4
        journal = read_rows(workspace.root / ".out.jsonl" / "journal.jsonl")
        assert [record["type"] for record in journal] == ["unconfirmed"]
        assert journal[0]["tokens"] >= reported

"""The demo as its user sees it, and a training run that outlives the server that started it."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest
from mcp import Client, StdioServerParameters
from rich.console import Console

from stillroom import api
from stillroom.errors import InputError
from stillroom.settings import Workspace
from stillroom_mcp.demo.chain import DemoSettings, run_chain
from stillroom_mcp.demo.guide import DemoStoppedError, Guide, print_comparisons
from stillroom_mcp.demo.run import RESULT_ORDER, free_folder, run_demo

TINY = DemoSettings(num_rollouts=16, num_heldout=8, num_iterations=1, num_kl_prompts=2)
NUM_STEPS = 2
WAITING_TOOLS = """

from pathlib import Path
from time import sleep

ROOT = Path({root!r})
look_up_at_once = look_up


def look_up(item, column, args):
    if any(b'"metrics"' in log.read_bytes() for log in ROOT.glob("runs/*/events.jsonl")):
        (ROOT / "waiting").touch()
        while not (ROOT / "go on").exists():
            sleep(0.01)
    return look_up_at_once(item, column, args)
"""
"""Tools that wait for a file once the run has taken a step."""


@pytest.mark.usefixtures("warm_python")
def test_the_whole_chain_ends_with_its_table_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(str(tmp_path / "demo"), seed=1, settings=TINY) == 0
    shown = capsys.readouterr().out
    for name in RESULT_ORDER:
        assert re.search(rf"{name} +│ +[01]\.\d", shown), name
    assert "SFT, tokens → SFT, soft:" in shown
    assert "SFT, soft → on-policy:" in shown
    assert "exports/clerk/README.md: base demo/student, taught by demo/teacher" in shown
    report = (tmp_path / "demo/report.html").read_text(encoding="utf-8")
    assert "on-policy" in report
    runs = api.list_runs(Workspace(tmp_path / "demo"), api.ListRuns(limit=50)).runs
    assert sorted(run.kind for run in runs) == sorted(
        ["rollouts"] + ["evaluate"] * 5 + ["sft", "sft", "distill", "export"]
    )
    assert {run.status for run in runs} == {"succeeded"}


def test_a_failure_beside_the_stages_stops_the_demo_with_its_reason() -> None:
    guide = Guide(ClientOfEndlessStage(), Console(quiet=True))

    async def chain() -> None:
        with anyio.fail_after(5):
            await run_chain(guide, TINY, seed=1)

    with pytest.raises(DemoStoppedError, match="evaluate_model failed: no room"):
        anyio.run(chain)


class ClientOfEndlessStage:
    """A client of a server whose evaluations fail while the stage beside them never ends."""

    async def call_tool(self, tool: str, arguments: dict[str, Any]) -> Any:
        if tool == "get_run":
            await anyio.sleep_forever()
        content = {"checks": [], "good": 1, "bad": 0, "run_id": "run"}
        failed = tool == "evaluate_model"
        text = [SimpleNamespace(text="no room")]
        return SimpleNamespace(is_error=failed, content=text, structured_content=content)


def test_a_demo_that_stops_says_why_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopping(*_: object) -> None:
        raise DemoStoppedError("evaluate_model failed: no room")

    monkeypatch.setattr("stillroom_mcp.demo.run.run_chain", stopping)
    assert run_demo(str(tmp_path / "demo"), seed=1, settings=TINY) == 1
    assert "the demo stopped: evaluate_model failed: no room" in capsys.readouterr().out


def test_a_demo_on_an_unknown_machine_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no machine 'nowhere'"):
        run_demo(str(tmp_path / "demo"), seed=1, settings=TINY, where="nowhere")
    assert not (tmp_path / "demo").exists()


def test_a_second_demo_takes_a_folder_of_its_own(tmp_path: Path) -> None:
    assert free_folder(tmp_path) == "demo-project"
    (tmp_path / "demo-project").mkdir()
    assert free_folder(tmp_path) == "demo-project-2"
    (tmp_path / "demo-project-2").mkdir()
    assert free_folder(tmp_path) == "demo-project-3"


@pytest.mark.parametrize(
    ("difference", "is_significant", "verdict"),
    [
        (0.2, True, "beats SFT"),
        (0.02, False, "did not clearly beat"),
        (-0.2, True, "did not clearly beat"),
    ],
)
def test_the_closing_words_follow_the_figures(
    difference: float, is_significant: bool, verdict: str
) -> None:
    interval = {"value": difference, "low": difference - 0.1, "high": difference + 0.1}
    comparison: dict[str, Any] = {
        "baseline": "SFT, soft",
        "candidate": "on-policy",
        "difference": interval,
        "is_significant": is_significant,
        "tasks_shared": 300,
    }
    accuracy = {"accuracy": {"value": 0.5}}
    console = Console(record=True, quiet=False, width=200)
    print_comparisons(console, {"on-policy": accuracy, "teacher": accuracy}, [comparison] * 2)
    text = console.export_text()
    assert verdict in text
    assert ("learns more from the teacher's probabilities" in text) == (verdict == "beats SFT")


def test_training_goes_on_when_its_server_is_killed_and_the_next_one_sees_it_finish(
    tmp_path: Path, warm_program: Path
) -> None:
    run_id = anyio.run(start_training_then_kill_the_server, tmp_path, warm_program)
    seen = anyio.run(follow_with_a_new_server, tmp_path, warm_program, run_id)
    assert seen[0]["status"] == "running", seen[0]
    assert seen[0]["progress"]["done"] < NUM_STEPS
    assert seen[-1]["status"] == "succeeded", seen[-1]["error"]
    assert seen[-1]["result"]["steps"] == NUM_STEPS


async def start_training_then_kill_the_server(root: Path, warm_program: Path) -> str:
    with anyio.fail_after(110):
        async with Client(server_of(root, warm_program)) as client:
            await client.call_tool("create_project", {})
            with (root / "tools.py").open("a", encoding="utf-8") as tools:
                tools.write(WAITING_TOOLS.format(root=str(root)))
            overrides = [
                f"trainer.max_steps={NUM_STEPS}",
                "data.batch_size=4",
                "algorithm.substeps=1",
            ]
            training = {"config": "distill.yml", "overrides": overrides}
            run_id = (await answer_of(client, "start_training", training))["run_id"]
            while not (root / "waiting").exists():
                run = await answer_of(client, "get_run", {"run_id": run_id, "wait_s": 1})
                assert run["status"] in ("starting", "running"), run["error"]
            kill_server_of(root)
    return run_id


async def follow_with_a_new_server(
    root: Path, warm_program: Path, run_id: str
) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    with anyio.fail_after(110):
        async with Client(server_of(root, warm_program)) as client:
            while not seen or seen[-1]["status"] in ("starting", "running"):
                wait_s = 20 if seen else 0
                seen.append(
                    await answer_of(client, "get_run", {"run_id": run_id, "wait_s": wait_s})
                )
                (root / "go on").touch()
    return seen


async def answer_of(client: Client, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert result.structured_content is not None
    return result.structured_content


def server_of(root: Path, warm_program: Path) -> StdioServerParameters:
    """A server in a process of its own, whose runs begin in warm ones."""
    code = (
        "import runpy, sys\n"
        f"sys.executable = {str(warm_program)!r}\n"
        "runpy.run_module('stillroom_mcp', run_name='__main__', alter_sys=True)"
    )
    arguments = ["-P", "-c", code, "serve", "--workspace", str(root)]
    return StdioServerParameters(command=sys.executable, args=arguments)


def kill_server_of(root: Path) -> None:
    servers = [
        child
        for child in psutil.Process().children()
        if {"serve", str(root)} <= set(child.cmdline())
    ]
    assert len(servers) == 1
    servers[0].kill()
    servers[0].wait(timeout=10)

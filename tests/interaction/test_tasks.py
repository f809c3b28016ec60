"""Runs as tasks of the protocol: begun by a call, followed and cancelled by the id of the run."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project
from fakes.task_client import task_client
from stillroom.api import OPERATIONS
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server


def rollouts_from(base_url: str, **more: Any) -> dict[str, Any]:
    return {
        "input": "prompts.jsonl",
        "provider": "openai",
        "base_url": base_url,
        "model": "scripted",
        "tools": "tools.py",
        **more,
    }


def test_a_call_that_starts_a_run_is_a_task_whose_id_is_the_runs(tmp_path: Path) -> None:
    endpoint_project(tmp_path, num_prompts=4)

    async def scenario(base_url: str) -> None:
        async with task_client(build_server(Workspace(tmp_path))) as client:
            task = await client.call("generate_rollouts", rollouts_from(base_url))
            assert task["resultType"] == "task"
            assert task["status"] == "working"
            assert task["ttlMs"] is None
            run_id = task["taskId"]
            # It was on disk before the answer.
            state = json.loads((tmp_path / "runs" / run_id / "run.json").read_text())
            assert state["run_id"] == run_id
            ended = await client.ended(run_id)
        assert ended["status"] == "completed"
        content = ended["result"]["structuredContent"]
        assert ended["result"]["isError"] is False
        assert content["status"] == "succeeded"
        assert "filter_dataset" in content["next_step"]
        assert ended["lastUpdatedAt"] >= ended["createdAt"]
        # Another server of the workspace knows it, and so does the tool.
        server = build_server(Workspace(tmp_path))
        async with task_client(server) as client:
            assert (await client.send("tasks/get", taskId=run_id))["status"] == "completed"
        async with Client(server) as other:
            seen = await other.call_tool("get_run", {"run_id": run_id})
            assert seen.structured_content == content

    with ScriptedEndpoint() as endpoint:
        anyio.run(scenario, endpoint.base_url)


def test_a_task_that_is_cancelled_stops_its_run(tmp_path: Path) -> None:
    endpoint_project(tmp_path, num_prompts=4)

    async def scenario(base_url: str) -> None:
        async with task_client(build_server(Workspace(tmp_path))) as client:
            task = await client.call("generate_rollouts", rollouts_from(base_url))
            ack = await client.send("tasks/cancel", taskId=task["taskId"])
            assert "status" not in ack
            ended = await client.ended(task["taskId"])
            assert ended["status"] == "cancelled"
            assert "result" not in ended
            assert await client.send("tasks/cancel", taskId=task["taskId"]) == ack
            update = await client.send("tasks/update", taskId=task["taskId"], inputResponses={})
            assert update == ack

    with ScriptedEndpoint() as endpoint:
        endpoint.hold.clear()
        anyio.run(scenario, endpoint.base_url)


def test_a_run_that_fails_completes_its_task_with_an_error_that_says_what_to_do(
    tmp_path: Path,
) -> None:
    endpoint_project(tmp_path, num_prompts=1)

    async def scenario(base_url: str) -> dict[str, Any]:
        async with task_client(build_server(Workspace(tmp_path))) as client:
            task = await client.call("generate_rollouts", rollouts_from(base_url))
            return await client.ended(task["taskId"])

    with ScriptedEndpoint(status=401) as endpoint:
        ended = anyio.run(scenario, endpoint.base_url)
    assert ended["status"] == "completed"
    assert ended["result"]["isError"] is True
    content = ended["result"]["structuredContent"]
    assert content["status"] == "failed"
    assert content["error"]["fix"]
    assert content["next_step"] in ended["statusMessage"]


def test_a_call_that_is_refused_or_answers_at_once_is_no_task(tmp_path: Path) -> None:
    endpoint_project(tmp_path, num_prompts=1)

    async def scenario() -> None:
        async with task_client(build_server(Workspace(tmp_path))) as client:
            refused = await client.call("generate_rollouts", {"input": "none.jsonl"})
            assert refused["resultType"] == "complete"
            assert refused["isError"] is True
            at_once = await client.call("list_runs", {})
            assert at_once["resultType"] == "complete"
            assert not (tmp_path / "runs").exists()

    anyio.run(scenario)


def test_an_id_that_is_no_runs_whole_id_is_refused_and_a_server_that_reads_stops_none(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / "rollouts-abc"
    folder.mkdir(parents=True)
    state = {"run_id": "rollouts-abc", "kind": "rollouts", "status": "cancelled",
             "created_at": "2026-11-22T00:00:00.000Z"}  # fmt: skip
    request = {"kind": "rollouts", "workspace": str(tmp_path), "request": {}}
    (folder / "run.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")

    async def scenario() -> None:
        async with task_client(build_server(Workspace(tmp_path))) as client:
            for task_id in ("nothing", "../runs", "", "roll"):
                for method in ("tasks/get", "tasks/cancel"):
                    with pytest.raises(MCPError, match="unknown task"):
                        await client.send(method, taskId=task_id)
            assert (await client.send("tasks/get", taskId="rollouts-abc"))["status"] == "cancelled"
        reading = [operation for operation in OPERATIONS if operation.is_read_only]
        async with task_client(build_server(Workspace(tmp_path), reading)) as client:
            with pytest.raises(MCPError, match="this server cannot cancel runs"):
                await client.send("tasks/cancel", taskId="rollouts-abc")

    anyio.run(scenario)

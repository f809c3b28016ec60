"""Runs as tasks: the id of a task is the id of its run.

A run is on disk before its call is answered, so any client of any server of the workspace can
follow it, with tasks/get or with get_run.
"""

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import anyio
from mcp.server.context import CallNext, HandlerResult
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_REQUEST, CallToolRequestParams, CallToolResult, TextContent

from stillroom import api, fences
from stillroom.api import OPERATIONS, operation_named
from stillroom.errors import EngineError
from stillroom.settings import Workspace
from stillroom_mcp.answers import structured_content
from stillroom_mcp.next_steps import poll_after_s
from stillroom_mcp.tasks.extension import RequestContext, Task

_RUN_TOOLS = frozenset(o.name for o in OPERATIONS if o.starts_run or o.may_become_run)
_GET_RUN = operation_named("get_run")


class RunTasks:
    """The runs of a workspace as tasks."""

    def __init__(self, workspace: Workspace, listed: Collection[str]) -> None:
        self._workspace = workspace
        self._tool_names = listed
        """The tools of the server; a read-only server has no tool that cancels runs."""

    def support(self, tool: str) -> Literal["none", "optional", "required"]:
        """Returns `optional` for tools that start a run, or may start one."""
        return "optional" if tool in _RUN_TOOLS else "none"

    async def begin(
        self, params: CallToolRequestParams, ctx: RequestContext, call_next: CallNext
    ) -> Task | HandlerResult:
        """Starts a run and returns it as a task, or the result if the call started no run.

        Training several models starts several runs, which one task cannot represent.
        """
        result = await call_next(ctx)
        answer = _structured_content(result)
        if "run_id" not in answer or answer.get("then"):
            return result
        return await self.find(answer["run_id"]) or result

    async def find(self, task_id: str) -> Task | None:
        """Returns the run with exactly this id as a task."""
        return await anyio.to_thread.run_sync(self._find, task_id)

    async def answer(self, task_id: str, responses: Mapping[str, Any]) -> None:
        """Ignores the answers, since a run asks nothing after its start."""

    async def cancel(self, task_id: str) -> None:
        """Cancels a run. Raises MCPError if this server does not have cancel_run."""
        if "cancel_run" not in self._tool_names:
            raise MCPError(
                INVALID_REQUEST,
                f"this server cannot cancel runs; use `stillroom cancel-run {task_id}`",
            )
        request = api.CancelRun(run_id=task_id)
        await anyio.to_thread.run_sync(api.cancel_run, self._workspace, request)

    def _find(self, task_id: str) -> Task | None:
        request = api.GetRun(run_id=task_id)
        try:
            report = api.get_run(self._workspace, request)
        except EngineError:
            return None
        if report.run_id != task_id:
            return None
        state_file = self._workspace.root / report.folder / "run.json"
        task = Task(
            task_id=task_id,
            status="working",
            created_at=report.created_at,
            updated_at=_changed_at(state_file, report.created_at),
            message=progress_message(report),
            poll_ms=int(1000 * (poll_after_s(report) or 1)),
        )
        return task if report.status in ("starting", "running") else self._ended_task(task, report)

    def _ended_task(self, task: Task, report: api.RunReport) -> Task:
        """Returns the task of a run that has ended, with the run's result."""
        status = "cancelled" if report.status == "cancelled" else "completed"
        request = api.GetRun(run_id=report.run_id)
        answer = structured_content(self._workspace, _GET_RUN, request, report)
        result = CallToolResult(
            content=[TextContent(type="text", text=json.dumps(answer, ensure_ascii=False))],
            structured_content=answer,
            # A failed run is a tool error; a task fails only with a protocol error.
            is_error=report.status != "succeeded",
        )
        result_json = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        return Task(
            task_id=task.task_id,
            status=status,
            created_at=task.created_at,
            updated_at=task.updated_at,
            message=f"{report.status}: {answer['next_step']}",
            poll_ms=task.poll_ms,
            result=None if status == "cancelled" else result_json,
        )


def _structured_content(result: HandlerResult) -> dict[str, Any]:
    if isinstance(result, CallToolResult) and not result.is_error:
        return result.structured_content or {}
    return {}


def _changed_at(state_file: Path, created_at: str) -> str:
    try:
        seconds = state_file.stat().st_mtime
    except OSError:
        return created_at
    changed = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return changed.replace("+00:00", "Z")


def progress_message(report: api.RunReport) -> str:
    """Returns the text of a task's progress."""
    progress = report.progress
    if progress is None:
        return str(report.status)
    phase, unit = fences.safe_name(progress.phase), fences.safe_name(progress.unit)
    return f"{phase}: {progress.done} of {progress.total} {unit}"

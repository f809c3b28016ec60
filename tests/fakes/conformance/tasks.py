"""The tasks of the suite, kept in memory: tools that sleep, fail, and wait for a person."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import anyio
import anyio.abc
from mcp.server.context import CallNext, HandlerResult
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR, CallToolRequestParams, CallToolResult, InputRequiredResult

from fakes.conformance.fixtures import NAME, answered, question, text
from stillroom_mcp.tasks.extension import RequestContext, Task

_REQUIRED = frozenset({"failing_job", "test_tool_with_task"})
_OPTIONAL = frozenset({"slow_compute", "protocol_error_job", "confirm_delete", "multi_input"})
_QUESTIONS = {
    "confirm_delete": ["confirm"],
    "multi_input": ["first", "second"],
}


class FakeTasks:
    """Tasks that the server's own process works on, in the task group it is given."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._tasks: dict[str, dict[str, Any]] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._open: dict[str, set[str]] = {}

    def support(self, tool: str) -> Literal["none", "optional", "required"]:
        if tool in _REQUIRED:
            return "required"
        return "optional" if tool in _OPTIONAL else "none"

    async def begin(
        self, params: CallToolRequestParams, ctx: RequestContext, call_next: CallNext
    ) -> Task | HandlerResult:
        if params.name == "test_tool_with_task" and not params.input_responses:
            return await call_next(ctx)
        task_id = f"fake-{len(self._tasks)}"
        self._tasks[task_id] = {"status": "working", "created_at": _now(), "updated_at": _now()}
        self._open[task_id] = set(_QUESTIONS.get(params.name, ()))
        self._scopes[task_id] = anyio.CancelScope()
        task = await self.find(task_id)
        self._group.start_soon(self._work, task_id, ctx, call_next)
        return task

    async def _work(self, task_id: str, ctx: RequestContext, call_next: CallNext) -> None:
        with self._scopes[task_id] as scope:
            try:
                while self._open[task_id]:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                result = await call_next(ctx)
                assert isinstance(result, CallToolResult)
                wire = result.model_dump(by_alias=True, mode="json", exclude_none=True)
                self._set(task_id, status="completed", result=wire)
            except MCPError as error:
                self._set(task_id, status="failed", error=error.error.model_dump(exclude_none=True))
        if scope.cancelled_caught:
            self._set(task_id, status="cancelled")

    def _set(self, task_id: str, **changes: Any) -> None:
        self._tasks[task_id] |= {**changes, "updated_at": _now()}

    async def find(self, task_id: str) -> Task | None:
        if task_id not in self._tasks:
            return None
        task = Task(task_id=task_id, poll_ms=200, **self._tasks[task_id])
        if task.status != "working" or not self._open[task_id]:
            return task
        asked_for = {
            key: question(f"{key}?", confirm={"type": "boolean"}).model_dump(
                by_alias=True, mode="json", exclude_none=True
            )
            for key in sorted(self._open[task_id])
        }
        fields = {**self._tasks[task_id], "status": "input_required"}
        return Task(task_id=task_id, poll_ms=200, input_requests=asked_for, **fields)

    async def answer(self, task_id: str, responses: Mapping[str, Any]) -> None:
        self._open[task_id] -= set(responses)

    async def cancel(self, task_id: str) -> None:
        self._scopes[task_id].cancel()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def add_task_tools(server: MCPServer) -> None:
    """Adds the tools whose calls become tasks."""
    tool = server.tool

    @tool(description="Greets.")
    def greet(name: str) -> CallToolResult:
        return text(f"Hello, {name}!")

    @tool(description="Sleeps.")
    async def slow_compute(seconds: float = 0, label: str = "") -> CallToolResult:
        await anyio.sleep(seconds)
        return text(f"computed {label}")

    @tool(description="Fails after a while.")
    async def failing_job() -> CallToolResult:
        await anyio.sleep(0.5)
        raise ToolError("the job failed")

    @tool(description="Breaks the protocol.")
    async def protocol_error_job() -> CallToolResult:
        raise MCPError(INTERNAL_ERROR, "protocol error")

    @tool(description="Deletes after a person agreed.")
    def confirm_delete(filename: str) -> CallToolResult:
        return text(f"deleted {filename}")

    @tool(description="Asks two things at once.")
    def multi_input() -> CallToolResult:
        return text("both answered")

    @tool(description="Asks for a name, then goes on as a task.")
    def test_tool_with_task(ctx: Context) -> CallToolResult | InputRequiredResult:
        answer = answered(ctx, "user_name")
        if answer is None:
            return InputRequiredResult(input_requests={"user_name": NAME})
        return text(f"Hello, {answer['content']['name']}!")

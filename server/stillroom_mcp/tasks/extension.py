"""The tasks extension of MCP (`io.modelcontextprotocol/tasks`).

A client that supports it gets a task as the answer to a long call, and polls it with tasks/get.
Other clients get the result of the tool.
Source: https://modelcontextprotocol.io/seps/2663-tasks-extension
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver.server import require_client_extension
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp.types import HEADER_MISMATCH, INVALID_PARAMS, CallToolRequestParams, RequestParams
from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

TASKS = "io.modelcontextprotocol/tasks"
_VERSIONS = frozenset({"2026-07-28"})
_DONE: dict[str, Any] = {"resultType": "complete"}

RequestContext = ServerRequestContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A call that continues after it was answered."""

    task_id: str
    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    created_at: str
    """In ISO 8601, like `updated_at`."""
    updated_at: str
    message: str | None = None
    poll_ms: int = 2000
    """The milliseconds to wait before the next poll."""
    result: Mapping[str, Any] | None = None
    """The tool's result as JSON values; only if the task is completed."""
    error: Mapping[str, Any] | None = None
    """The JSON-RPC error of a failed task; an error of the tool is a result instead."""
    input_requests: Mapping[str, Any] | None = None
    """The questions that the user must still answer, by key; only if the task needs input."""

    def creation_answer(self) -> dict[str, Any]:
        """Returns the answer to the call that created the task."""
        fields = {
            "taskId": self.task_id,
            "status": self.status,
            "statusMessage": self.message,
            "createdAt": self.created_at,
            "lastUpdatedAt": self.updated_at,
            "pollIntervalMs": self.poll_ms,
        }
        set_fields = {name: value for name, value in fields.items() if value is not None}
        # Stillroom never deletes the folder of a run, so its task does not expire.
        return {"resultType": "task", **set_fields, "ttlMs": None}

    def status_answer(self) -> dict[str, Any]:
        """Returns the answer to tasks/get."""
        fields = {
            "result": self.result,
            "error": self.error,
            "inputRequests": self.input_requests,
        }
        set_fields = {name: value for name, value in fields.items() if value is not None}
        return {**self.creation_answer(), **set_fields, **_DONE}


class TaskSource(Protocol):
    """A kind of task, and the tools whose calls become tasks of this kind."""

    def support(self, tool: str) -> Literal["none", "optional", "required"]:
        """Returns whether a tool's calls become tasks; `optional`: if the client supports tasks."""
        ...

    async def begin(
        self, params: CallToolRequestParams, ctx: RequestContext, call_next: CallNext
    ) -> Task | HandlerResult:
        """Makes the call and returns its task, which `find` then finds, or else its result."""
        ...

    async def find(self, task_id: str) -> Task | None:
        """Returns the current state of a task, or None if it is not from this source."""
        ...

    async def answer(self, task_id: str, responses: Mapping[str, Any]) -> None:
        """Gives a task the answers to its questions, by key; unknown keys are ignored."""
        ...

    async def cancel(self, task_id: str) -> None:
        """Asks a task to stop; does nothing if it has ended."""
        ...


class _TaskParams(RequestParams):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    task_id: str


class _UpdateParams(_TaskParams):
    input_responses: dict[str, Any]


class Tasks(Extension):
    """Answers tool calls with tasks, and handles the methods that poll, update and cancel tasks."""

    identifier = TASKS

    def __init__(self, *sources: TaskSource) -> None:
        self._sources = sources

    def methods(self) -> list[MethodBinding]:
        """Returns tasks/get, tasks/update and tasks/cancel."""
        return [
            MethodBinding("tasks/get", _TaskParams, self._get, _VERSIONS),
            MethodBinding("tasks/update", _UpdateParams, self._update, _VERSIONS),
            MethodBinding("tasks/cancel", _TaskParams, self._cancel, _VERSIONS),
        ]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: RequestContext, call_next: CallNext
    ) -> HandlerResult:
        """Returns a call's task if there is one and the client supports tasks, else its result."""
        for source in self._sources:
            support = source.support(params.name)
            if support == "none":
                continue
            if support == "required":
                require_client_extension(ctx, TASKS)
            if not _supports_tasks(ctx):
                break
            outcome = await source.begin(params, ctx, call_next)
            return outcome.creation_answer() if isinstance(outcome, Task) else outcome
        return await call_next(ctx)

    async def _get(self, ctx: RequestContext, params: _TaskParams) -> dict[str, Any]:
        _, task = await self._find(ctx, params.task_id)
        return task.status_answer()

    async def _update(self, ctx: RequestContext, params: _UpdateParams) -> dict[str, Any]:
        source, _ = await self._find(ctx, params.task_id)
        await source.answer(params.task_id, params.input_responses)
        return _DONE

    async def _cancel(self, ctx: RequestContext, params: _TaskParams) -> dict[str, Any]:
        source, _ = await self._find(ctx, params.task_id)
        await source.cancel(params.task_id)
        return _DONE

    async def _find(self, ctx: RequestContext, task_id: str) -> tuple[TaskSource, Task]:
        require_client_extension(ctx, TASKS)
        _check_name_header(ctx, task_id)
        for source in self._sources:
            if (task := await source.find(task_id)) is not None:
                return source, task
        raise MCPError(INVALID_PARAMS, f"unknown task {task_id!r}; list_runs lists all runs")


def _check_name_header(ctx: RequestContext, task_id: str) -> None:
    """Raises MCPError if the Mcp-Name header, which routes the request, names another task."""
    headers: Mapping[str, str] = getattr(ctx.request, "headers", None) or {}
    header = headers.get(MCP_NAME_HEADER)
    if header is not None and decode_header_value(header) != task_id:
        raise MCPError(HEADER_MISMATCH, f"the Mcp-Name header differs from the taskId {task_id!r}")


def _supports_tasks(ctx: RequestContext) -> bool:
    declared = ctx.session.client_capabilities
    extensions = (declared.extensions if declared else None) or {}
    return ctx.protocol_version in _VERSIONS and TASKS in extensions

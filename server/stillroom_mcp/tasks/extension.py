"""The tasks extension (`io.modelcontextprotocol/tasks`) on the wire.

A client that declares it gets a task in answer to a call that takes long, and asks after it with
tasks/get. Every other client gets what the tool returns.
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
    """A call that continues after its answer."""

    task_id: str
    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    created_at: str
    """ISO 8601, as `updated_at`."""
    updated_at: str
    message: str | None = None
    poll_ms: int = 2000
    """How many milliseconds to wait before asking again."""
    result: Mapping[str, Any] | None = None
    """What the tool returned, as it would have been on the wire; of a completed task only."""
    error: Mapping[str, Any] | None = None
    """The JSON-RPC error of a failed task; a tool's own error is the result of a completed one."""
    input_requests: Mapping[str, Any] | None = None
    """What a person must still answer, by key; of a task that needs input only."""

    def created(self) -> dict[str, Any]:
        """Returns the answer to the call that made the task."""
        fields = {
            "taskId": self.task_id,
            "status": self.status,
            "statusMessage": self.message,
            "createdAt": self.created_at,
            "lastUpdatedAt": self.updated_at,
            "pollIntervalMs": self.poll_ms,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        # A run's folder is never deleted by stillroom, so its task has no end.
        return {"resultType": "task", **given, "ttlMs": None}

    def detailed(self) -> dict[str, Any]:
        """Returns the answer to tasks/get."""
        fields = {
            "result": self.result,
            "error": self.error,
            "inputRequests": self.input_requests,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return {**self.created(), **given, **_DONE}


class TaskSource(Protocol):
    """A kind of tasks, and the tools that make them."""

    def support(self, tool: str) -> Literal["none", "optional", "required"]:
        """Returns whether a tool's calls become tasks: never, if the client knows tasks, always."""
        ...

    async def begin(
        self, params: CallToolRequestParams, ctx: RequestContext, call_next: CallNext
    ) -> Task | HandlerResult:
        """Makes the call; returns its task, which can be found by now, or its result."""
        ...

    async def find(self, task_id: str) -> Task | None:
        """Returns a task as it is now, or None if it is none of this source."""
        ...

    async def answer(self, task_id: str, responses: Mapping[str, Any]) -> None:
        """Hands answers to a task by the keys of its requests; other keys are ignored."""
        ...

    async def cancel(self, task_id: str) -> None:
        """Asks a task to stop; does nothing to one that has ended."""
        ...


class _TaskParams(RequestParams):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    task_id: str


class _UpdateParams(_TaskParams):
    input_responses: dict[str, Any]


class Tasks(Extension):
    """Answers the calls of tools with tasks, and the methods by which a client follows them."""

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
        """Returns a call's task if there is one and the client knows tasks, else its result."""
        for source in self._sources:
            support = source.support(params.name)
            if support == "none":
                continue
            if support == "required":
                require_client_extension(ctx, TASKS)
            if not _knows_tasks(ctx):
                break
            begun = await source.begin(params, ctx, call_next)
            return begun.created() if isinstance(begun, Task) else begun
        return await call_next(ctx)

    async def _get(self, ctx: RequestContext, params: _TaskParams) -> dict[str, Any]:
        _, task = await self._found(ctx, params.task_id)
        return task.detailed()

    async def _update(self, ctx: RequestContext, params: _UpdateParams) -> dict[str, Any]:
        source, _ = await self._found(ctx, params.task_id)
        await source.answer(params.task_id, params.input_responses)
        return _DONE

    async def _cancel(self, ctx: RequestContext, params: _TaskParams) -> dict[str, Any]:
        source, _ = await self._found(ctx, params.task_id)
        await source.cancel(params.task_id)
        return _DONE

    async def _found(self, ctx: RequestContext, task_id: str) -> tuple[TaskSource, Task]:
        require_client_extension(ctx, TASKS)
        _check_name(ctx, task_id)
        for source in self._sources:
            if (task := await source.find(task_id)) is not None:
                return source, task
        raise MCPError(INVALID_PARAMS, f"there is no task {task_id!r}; list_runs names all runs")


def _check_name(ctx: RequestContext, task_id: str) -> None:
    """Raises MCPError if the request's header names another task, by which it was routed."""
    headers: Mapping[str, str] = getattr(ctx.request, "headers", None) or {}
    named = headers.get(MCP_NAME_HEADER)
    if named is not None and decode_header_value(named) != task_id:
        raise MCPError(HEADER_MISMATCH, f"the header Mcp-Name is not the taskId {task_id!r}")


def _knows_tasks(ctx: RequestContext) -> bool:
    declared = ctx.session.client_capabilities
    extensions = (declared.extensions if declared else None) or {}
    return ctx.protocol_version in _VERSIONS and TASKS in extensions

"""The operations as MCP tools: strict arguments, structured results, errors that name a fix."""

import functools
import itertools
import json
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from typing import Any

import anyio
import anyio.from_thread
import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata
from mcp.types import CallToolResult, InputRequiredResult, TextContent, ToolAnnotations
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillroom import api, fences
from stillroom.api import Operation
from stillroom.errors import EngineError, writable_text
from stillroom.reporting import background_tasks
from stillroom.settings import Workspace
from stillroom.validation import describe_errors
from stillroom_mcp.answers import input_schema, output_schema, structured_content
from stillroom_mcp.consent import with_consent
from stillroom_mcp.dashboard.chat_views import view_meta
from stillroom_mcp.fencing import fenced_error, fenced_quote

_POLL_S = 0.5


class OperationTool(Tool):
    """One operation as an MCP tool; its request model gives the schema and validates arguments."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    operation: Operation = Field(exclude=True)
    workspace: Workspace = Field(exclude=True)

    async def run(
        self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False
    ) -> CallToolResult | InputRequiredResult:
        """Runs one call and returns its result, or the question that the user must answer first.

        Raises ToolError, whose text names a fix.
        """
        operation = self.operation

        def redacted(text: str) -> str:
            return self.workspace.redactor().redact_text(text)

        try:
            request = parse_arguments(operation, arguments)
            if isinstance(request, api.GetRun):
                result = await wait_for_run(self.workspace, request, context)
            else:
                run = functools.partial(_call_operation, self.workspace, operation, context)
                outcome = await with_consent(self.workspace, request, context, run)
                if isinstance(outcome, InputRequiredResult):
                    return outcome
                request, result = outcome.request, outcome.result
        except EngineError as error:
            raise ToolError(redacted(fenced_error(error))) from error
        except OSError as error:
            raise ToolError(
                f"operating system error: {error}\nfix: check disk space and permissions"
            ) from error
        except MemoryError as error:
            raise ToolError(
                f"{operation.name} ran out of memory\n"
                "fix: close other programs, or work on fewer rows"
            ) from error
        # The outermost handler: the agent gets a short message, the server's log the traceback.
        except Exception as error:
            if isinstance(error, ToolError):
                raise
            traceback.print_exc(file=sys.stderr)
            raise ToolError(
                f"{operation.name} failed unexpectedly: {type(error).__name__}\n"
                f"{redacted(fenced_quote(writable_text(str(error))))}\n"
                "fix: this is a bug in Stillroom; report it with the traceback in the server's log"
            ) from error
        answer = structured_content(self.workspace, operation, request, result)
        text = json.dumps(answer, ensure_ascii=False)
        return CallToolResult(
            content=[TextContent(type="text", text=text)], structured_content=answer
        )


async def _call_operation(
    workspace: Workspace, operation: Operation, context: Context[Any, Any], request: BaseModel
) -> msgspec.Struct:
    call = functools.partial(api.carry_out, workspace, operation, request)
    if operation.has_child:
        return await _call_with_child(call, context)
    return await anyio.to_thread.run_sync(call)


async def _call_with_child(
    call: Callable[[], msgspec.Struct], context: Context[Any, Any]
) -> msgspec.Struct:
    """Runs a call that starts a child process, which is killed if the client cancels the call.

    Messages that the child reports are sent to the client as progress.
    """
    is_cancelled, numbers = threading.Event(), itertools.count(1)

    def report(text: str) -> None:
        anyio.from_thread.run(context.report_progress, next(numbers), None, text)

    async with background_tasks() as group:
        group.start_soon(_set_when_cancelled, is_cancelled)
        with api.kill_children_on(is_cancelled), api.report_progress_to(report):
            return await anyio.to_thread.run_sync(call)


async def _set_when_cancelled(event: threading.Event) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        event.set()


def parse_arguments(operation: Operation, arguments: dict[str, Any]) -> BaseModel:
    """Returns the validated request.

    Raises ToolError, which names each invalid argument, and the closest name for an unknown one.
    """
    try:
        return operation.request.model_validate(_with_parsed_lists(operation.request, arguments))
    except ValidationError as error:
        problems = describe_errors(error, operation.request)
        raise ToolError(
            f"{operation.name}: {problems}\nfix: correct the arguments and call again"
        ) from error


def _with_parsed_lists(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments; lists that an MCP host sent as JSON text are parsed."""
    decoded = dict(arguments)
    for name, value in arguments.items():
        field = model.model_fields.get(name)
        if field is None or not isinstance(value, str) or "tuple" not in str(field.annotation):
            continue
        try:
            parsed = json.loads(value)
        except ValueError:
            continue
        if isinstance(parsed, list):
            decoded[name] = parsed
    return decoded


async def wait_for_run(
    workspace: Workspace, request: api.GetRun, context: Context[Any, Any]
) -> api.RunReport:
    """Returns the report of a run when `RunWatch` gives a reason, at the latest after `wait_s`.

    While it waits, it reports the run's progress to the client.
    """
    first = await anyio.to_thread.run_sync(api.get_run, workspace, request)
    if not request.wait_s:
        return first
    watch, report, started = api.RunWatch(first, request.wait_s), first, anyio.current_time()
    while (reason := watch.reason(report, anyio.current_time() - started)) is None:
        if report.progress is not None:
            await context.report_progress(
                report.progress.done, report.progress.total, fences.safe_name(report.progress.phase)
            )
        await anyio.sleep(_POLL_S)
        report = await anyio.to_thread.run_sync(api.get_run, workspace, request)
    return msgspec.structs.replace(report, answered_at=reason)


def tool_for(
    operation: Operation, workspace: Workspace, *, listed: Collection[str]
) -> OperationTool:
    """Returns the MCP tool that runs an operation in this workspace.

    `listed` are the names of all tools of the server.
    """
    return OperationTool(
        operation=operation,
        workspace=workspace,
        fn=functools.partial(api.carry_out, workspace, operation),
        name=operation.name,
        title=operation.title,
        description=operation.description,
        parameters=input_schema(operation, listed=listed),
        fn_metadata=FuncMetadata(arg_model=ArgModelBase, output_schema=output_schema(operation)),
        is_async=True,
        context_kwarg=None,
        meta=view_meta(operation.name, starts_run=operation.starts_run),
        annotations=ToolAnnotations(
            title=operation.title,
            read_only_hint=operation.is_read_only,
            destructive_hint=operation.is_destructive,
            idempotent_hint=operation.is_idempotent,
            open_world_hint=operation.is_open_world,
        ),
    )

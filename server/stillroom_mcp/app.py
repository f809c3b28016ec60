"""The MCP server, which offers every operation as a tool."""

from collections.abc import Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup
from mcp.server.context import ServerMiddleware
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, InputRequiredResult, Resource

from stillroom import __version__, fences
from stillroom.api import OPERATIONS, Operation
from stillroom.settings import Workspace
from stillroom.validation import did_you_mean
from stillroom_mcp.answers import escape_unwritable_text
from stillroom_mcp.dashboard.chat_views import chat_views
from stillroom_mcp.resources.prompts import add_completions, add_prompts
from stillroom_mcp.resources.provide import add_resources, listed_resources
from stillroom_mcp.resources.updates import RunUpdates
from stillroom_mcp.tasks.extension import Tasks, TaskSource
from stillroom_mcp.tasks.runs import RunTasks
from stillroom_mcp.tools import tool_for

INSTRUCTIONS = """\
Stillroom distils a strong teacher into a small model the user owns.
Prompts or a CSV and a teacher, or logs: run_recipe does all of it in one run (skill://distil/SKILL.md).
Step by step: skill://off-policy-distillation/SKILL.md and others, or `stillroom setup HOST`.
From logs, traces or sessions by hand: import_rollouts first (skill://import-traces/SKILL.md).
Off-policy: generate_rollouts -> filter_dataset -> convert_rollouts -> start_training (sft).
Preferences: make_dpo_pairs -> start_training (dpo).
Open-weight teacher, on-policy: start_training (distill; skill://on-policy-distillation/SKILL.md).
No GPU here: list_machines, then `where` with calls that start runs (skill://remote-training/SKILL.md).
evaluate_model before and after each stage, then compare_evaluations.
Every result has next_step. Runs continue without this server: look at them with get_run.
Try it without key or GPU: create_project(template=demo), provider demo.
"""


_FEWER_TOOLS = "Operations without a tool here are CLI commands: stillroom --help.\n"


def build_server(
    workspace: Workspace,
    operations: Sequence[Operation] = OPERATIONS,
    *,
    more_tasks: Sequence[TaskSource] = (),
) -> "CompleteServer":
    """Returns an MCP server whose tools work in this workspace.

    `more_tasks` are tasks other than runs; only the protocol tests use them.
    """
    listed = {operation.name for operation in operations}
    updates = RunUpdates(workspace)
    added_middleware = [escape_unwritable_text, updates.middleware]
    server = CompleteServer(
        "stillroom",
        title="Stillroom",
        version=__version__,
        instructions=INSTRUCTIONS + ("" if len(listed) == len(OPERATIONS) else _FEWER_TOOLS),
        tools=[tool_for(operation, workspace, listed=listed) for operation in operations],
        extensions=[Tasks(RunTasks(workspace, listed), *more_tasks), chat_views()],
        middleware=added_middleware,
        subscriptions=updates.bus,
        lifespan=updates.lifespan,
        log_level="WARNING",
    )
    server.workspace, server.updates, server.added_middleware = workspace, updates, added_middleware
    updates.add_to(server)
    add_resources(server, workspace)
    add_prompts(server, workspace)
    add_completions(server, workspace)
    return server


class CompleteServer(MCPServer[TaskGroup]):
    """The complete server of a workspace, which also lists its runs as resources."""

    workspace: Workspace
    updates: RunUpdates
    added_middleware: list[ServerMiddleware[Any]]
    """The middleware that stillroom adds to the SDK's."""

    @property
    def methods(self) -> list[str]:
        """The names of the requests that the server handles, sorted."""
        return sorted(self._lowlevel_server._request_handlers)  # pyright: ignore[reportPrivateUsage]

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any],
        context: Context[TaskGroup, Any] | None = None,
    ) -> CallToolResult | InputRequiredResult:
        """Calls a tool. Raises ToolError, which suggests the closest name for an unknown tool."""
        tool_names = [tool.name for tool in self._tool_manager.list_tools()]
        if name not in tool_names:
            is_command = any(operation.name == name for operation in OPERATIONS)
            problem = f"unknown tool {fences.one_line(name)!r}{did_you_mean(name, tool_names)}"
            fix = (
                f"call `stillroom {name.replace('_', '-')}` in a shell"
                if is_command
                else (f"the tools are: {', '.join(tool_names)}")
            )
            raise ToolError(f"{problem}\nfix: {fix}")
        return await super().call_tool(name, arguments, context)

    async def list_resources(self) -> list[Resource]:
        """Returns the resources that exist now."""
        resources = await anyio.to_thread.run_sync(listed_resources, self.workspace)
        return resources + await super().list_resources()

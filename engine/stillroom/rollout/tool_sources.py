"""Opening every place that a run's tools come from, together."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from stillroom.data.formats import Task
from stillroom.files import content_hash
from stillroom.rollout.episode.loop import tool_task
from stillroom.rollout.request import RolloutOptions
from stillroom.settings import Workspace, tool_environment
from stillroom.teachers.providers import TEACHER_KEYS
from stillroom.tools.base import ToolSource
from stillroom.tools.browser.tool import BrowseTools
from stillroom.tools.combined import CombinedTools
from stillroom.tools.containers.docker import PLAYWRIGHT, DockerTools
from stillroom.tools.mcp.servers import MCPTools
from stillroom.tools.user.pool import UserPool


class ToolSources:
    """tools.py, MCP servers, the browser and the containers of the rows, as the options name them.

    `notes` tells, once they are open, what a user should know of them.
    """

    def __init__(
        self, workspace: Workspace, options: RolloutOptions, tasks: Sequence[Task]
    ) -> None:
        self._workspace, self._options = workspace, options
        self._tasks = [tool_task(task) for task in tasks]
        self.notes: list[str] = []

    @asynccontextmanager
    async def open(self, pool: UserPool | None) -> AsyncGenerator[ToolSource | None]:
        """Gives all tools as one source, or None where there are none; `pool` is open already.

        Raises InputError if two of them have the same name, and what each source raises.
        """
        sources: dict[str, ToolSource] = {}
        async with AsyncExitStack() as stack:
            if pool is not None and pool.schemas:
                sources[self._options.tools] = pool
            for server in self._options.mcp_servers:
                tools = await stack.enter_async_context(self._mcp_tools(server))
                sources[tools.name] = tools
            browser = await self._open_browser(stack)
            if browser is not None and self._options.browse:
                sources["the browser"] = browser
            if any(task.docker for task in self._tasks):
                containers = await stack.enter_async_context(self._containers(browser))
                sources["the rows' containers"] = containers
                self.notes += containers.notes
            if len(sources) > 1:
                yield CombinedTools(sources)
            else:
                yield next(iter(sources.values()), None)

    def _mcp_tools(self, server: str) -> MCPTools:
        return MCPTools(
            server,
            tool_timeout_s=self._options.tool_timeout,
            folder=self._workspace.root,
            # Other people's programs: they get the environment, but no teacher's key.
            environment=tool_environment(without=TEACHER_KEYS),
        )

    async def _open_browser(self, stack: AsyncExitStack) -> BrowseTools | None:
        is_fallback = any(task.docker == PLAYWRIGHT for task in self._tasks)
        if not (self._options.browse or is_fallback):
            return None
        browser = BrowseTools(
            allow=self._options.browse_allow, call_timeout_s=self._options.tool_timeout
        )
        return await stack.enter_async_context(browser)

    def _containers(self, fallback: ToolSource | None) -> DockerTools:
        # The same run started again must know its containers, to remove what was left behind.
        identity = content_hash({"root": str(self._workspace.root), **self._options.model_dump()})
        return DockerTools(
            self._tasks,
            folder=self._workspace.root,
            run_id=identity[:16],
            fallback=fallback,
            tool_timeout_s=self._options.tool_timeout,
        )

"""An MCP client that knows the tasks extension."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp import Client
from mcp.client import advertise
from mcp.types import Request
from pydantic import TypeAdapter

from stillroom_mcp.tasks.extension import TASKS

_ANSWER = TypeAdapter(dict[str, Any])


class TaskClient:
    """Calls tools as tasks, and follows them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        request = Request[dict[str, Any], str](method=method, params=params)
        return await self._client.session.send_request(request, _ANSWER)

    async def call(self, tool: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
        return await self.send("tools/call", name=tool, arguments=arguments, **more)

    async def ended(self, task_id: str) -> dict[str, Any]:
        """Returns the task once it has ended."""
        with anyio.fail_after(60):
            while True:
                task = await self.send("tasks/get", taskId=task_id)
                if task["status"] != "working":
                    return task
                await anyio.sleep(0.1)


@asynccontextmanager
async def task_client(server: Any, **options: Any) -> AsyncIterator[TaskClient]:
    async with Client(server, extensions=[advertise(TASKS)], **options) as client:
        yield TaskClient(client)

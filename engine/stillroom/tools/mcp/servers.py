"""Tools of an MCP server, with a session of its own for each rollout."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from stillroom.errors import CallFailedError, FailureClass, InputError
from stillroom.tools.background import Background
from stillroom.tools.base import ToolResult, ToolTask, error_result
from stillroom.tools.mcp.connection import ConnectFailedError, Connection, ConnectionLostError
from stillroom.tools.mcp.shared import Opener
from stillroom.tools.mcp.spec import ServerSpec, Way, first_way, next_way, parse_spec
from stillroom.types import ToolSchema


class MCPTools:
    """One MCP server as a source of tools. Use as an async context manager.

    A session is a process of its own, or an HTTP session of its own, and ends with its rollout.
    The HTTP server runs already, or is started here by a command with `{port}`, once for all.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        tool_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        max_sessions: int = 20,
        prefix: str = "",
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`server`: a URL, a command line, or its words; it is run in `folder`.

        `max_sessions`: so many rollouts have their session at once; the others wait.
        `prefix` is put before the names of its tools, for servers that have the same names.
        """
        self._prefix = prefix
        self._spec = parse_spec(server, folder=folder, environment=environment)
        self._way = first_way(self._spec)
        self._tool_timeout_s = tool_timeout_s
        self._slots = anyio.Semaphore(max_sessions)
        self._background = Background()
        self._opener = Opener(self._spec, self._background, timeout_s=start_timeout_s)
        self._opened = AsyncExitStack()
        self._schemas: list[ToolSchema] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._background)
            stack.push_async_callback(self._opener.close)
            try:
                found = await find_tools(self._opener)
            except ConnectFailedError as error:
                raise _cannot_use(self._spec, error) from error
            self._opened = stack.pop_all()
        self._way = found.way
        self._schemas = [_prefixed(schema, self._prefix) for schema in found.schemas]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, trace)

    @property
    def name(self) -> str:
        """How the server is named in messages."""
        return f"the MCP server `{self._spec}`"

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The server's tools, in its order, as they were when it was opened."""
        return self._schemas

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns all of them: they do not depend on the task."""
        return self.schemas

    @property
    def keeps_state(self) -> bool:
        """True: a page, a shell, a file is where the last call left it."""
        return True

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator["MCPSession"]:
        """Gives the tools of one rollout; waits while too many rollouts have theirs.

        The wait is here and not in the first call, so that rollouts which need several limited
        sources take them in one order and never wait for each other.
        """
        async with self._slots:
            session = MCPSession(
                self._opener, self._way, prefix=self._prefix, tool_timeout_s=self._tool_timeout_s
            )
            try:
                yield session
            finally:
                await session.close()


class MCPSession:
    """The server's tools for one rollout. It starts with the first call."""

    def __init__(
        self, opener: Opener, way: Way, *, prefix: str = "", tool_timeout_s: float
    ) -> None:
        self._opener, self._way = opener, way
        self._tool_timeout_s, self._prefix = tool_timeout_s, prefix
        self._connection: Connection | None = None
        # One call after the other, in the order they were made: they share a page or a shell.
        self._turn = anyio.Lock()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool. After a server that hangs or dies the next call begins with a new one.

        Raises:
            CallFailedError: no session can be opened.
        """
        async with self._turn:
            connection = self._connection or await self._connect()
            try:
                return await connection.call(
                    name.removeprefix(self._prefix), arguments, timeout_s=self._tool_timeout_s
                )
            except ConnectionLostError as error:
                self._connection = None
                return error_result(
                    f"{name}: {error}{connection.ending()}. The tool server was stopped and what "
                    "it held is lost; the next call starts it anew"
                )
            except BaseException:
                # Its answer may still be on the way, so it can serve no other call.
                await self.close(now=True)
                raise

    @property
    def is_open(self) -> bool:
        """Whether the next call goes to the server of the last one."""
        return self._connection is not None

    async def close(self, *, now: bool = False) -> None:
        """Ends the session, with its process if it has one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(now=now)

    async def _connect(self) -> Connection:
        try:
            self._connection = await self._opener.open(self._way)
        except ConnectFailedError as error:
            message = f"the MCP server `{self._opener.spec}` gave no session: {error}"
            raise CallFailedError(FailureClass.TOOL_HOST, message) from error
        return self._connection


@dataclass(frozen=True, slots=True)
class FoundTools:
    """What a server offers, and how it is spoken to."""

    way: Way
    schemas: list[ToolSchema]


async def find_tools(opener: Opener) -> FoundTools:
    """Returns the tools of a server, asked in a session that is closed again.

    Raises:
        ConnectFailedError: there is no way to speak to it.
    """
    way, first = first_way(opener.spec), None
    while True:
        try:
            connection = await opener.open(way)
            schemas = await connection.list_tools(timeout_s=opener.timeout_s)
        except ConnectFailedError as error:
            first = first or error
            following = next_way(way, error.code)
            if following is None:
                raise first from None
            way = following
        else:
            await connection.close()
            return FoundTools(way, schemas)


def _prefixed(schema: ToolSchema, prefix: str) -> ToolSchema:
    if not prefix:
        return schema
    function = schema["function"]
    return {"type": "function", "function": {**function, "name": prefix + function["name"]}}


def _cannot_use(spec: ServerSpec, error: ConnectFailedError) -> InputError:
    fix = (
        "start that server, or correct its URL (most end in /mcp or /sse; some servers answer to "
        "localhost only, not to 127.0.0.1)"
        if spec.url
        else f"run the command by hand in {spec.folder}: it must start, and then "
        f"{'listen on the port it is given' if spec.is_shared else 'wait for input'}"
    )
    return InputError(f"the MCP server `{spec}` cannot be used: {error}", fix)

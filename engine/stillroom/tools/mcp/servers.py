"""The tools of an MCP server, with one session for each rollout."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio
from anyio import AsyncContextManagerMixin

from stillroom.errors import CallFailedError, FailureClass, InputError
from stillroom.tools.guard import Background
from stillroom.tools.mcp.connection import ConnectFailedError, Connection, ConnectionLostError
from stillroom.tools.mcp.opener import SessionOpener
from stillroom.tools.mcp.spec import (
    ServerDialect,
    ServerSpec,
    first_dialect,
    next_dialect,
    parse_spec,
)
from stillroom.tools.source import ToolResult, ToolSource, ToolTask, error_result
from stillroom.types import ToolSchema


class MCPTools(ToolSource, AsyncContextManagerMixin):
    """The tools of one MCP server. Use as an async context manager.

    Each rollout has its own process or HTTP session, which ends with the rollout. An HTTP server
    either runs already, or is started once if its command contains `{port}`.
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
        """`server` is a URL, a command line, or a command as a list; it runs in `folder`.

        At most `max_sessions` rollouts have a session at a time; the others wait. `prefix` is
        prepended to the tool names, so that those of two servers differ.
        """
        self._prefix = prefix
        self._spec = parse_spec(server, folder=folder, environment=environment)
        self._dialect = first_dialect(self._spec)
        self._tool_timeout_s = tool_timeout_s
        self._slots = anyio.Semaphore(max_sessions)
        self._background = Background()
        self._opener = SessionOpener(self._spec, self._background, timeout_s=start_timeout_s)
        self._schemas: list[ToolSchema] = []

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self._background:
            try:
                try:
                    server_tools = await list_server_tools(self._opener)
                except ConnectFailedError as error:
                    raise _unusable_error(self._spec, error) from error
                self._dialect = server_tools.dialect
                self._schemas = [
                    _with_prefix(schema, self._prefix) for schema in server_tools.schemas
                ]
                yield self
            finally:
                await self._opener.close()

    @property
    def name(self) -> str:
        """The name of the server in messages."""
        return f"the MCP server `{self._spec}`"

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of the server's tools when it was opened, in the server's order."""
        return self._schemas

    @property
    def keeps_state(self) -> bool:
        """True, since calls may share a page, a shell or files."""
        return True

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator["MCPSession"]:
        """Opens the tools of one rollout; waits while too many rollouts have a session.

        It waits here and not in the first call, so that rollouts that need several limited sources
        acquire them in the same order. Otherwise two rollouts could deadlock.
        """
        async with self._slots:
            session = MCPSession(
                self._opener,
                self._dialect,
                prefix=self._prefix,
                tool_timeout_s=self._tool_timeout_s,
            )
            try:
                yield session
            finally:
                await session.close()


class MCPSession:
    """The server's tools for one rollout; it connects with the first call."""

    def __init__(
        self,
        opener: SessionOpener,
        dialect: ServerDialect,
        *,
        prefix: str = "",
        tool_timeout_s: float,
    ) -> None:
        self._opener, self._dialect = opener, dialect
        self._tool_timeout_s, self._prefix = tool_timeout_s, prefix
        self._connection: Connection | None = None
        # Calls run one after the other, in the order they came, as they share a page or a shell.
        self._lock = anyio.Lock()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool. If the server hangs or dies, the next call starts a new one.

        Raises:
            CallFailedError: no session can be opened.
        """
        async with self._lock:
            connection = self._connection or await self._connect()
            try:
                return await connection.call(
                    name.removeprefix(self._prefix), arguments, timeout_s=self._tool_timeout_s
                )
            except ConnectionLostError as error:
                self._connection = None
                return error_result(
                    f"{name}: {error}{connection.exit_suffix()}. The tool server was stopped and "
                    "its state is lost; the next call restarts it"
                )
            except BaseException:
                # The server's answer may still arrive, so the session can serve no other call.
                await self.close(now=True)
                raise

    @property
    def is_open(self) -> bool:
        """Whether the next call uses the same server process as the last one."""
        return self._connection is not None

    async def close(self, *, now: bool = False) -> None:
        """Ends the session, and its server's process if the session owns it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(now=now)

    async def _connect(self) -> Connection:
        try:
            self._connection = await self._opener.open(self._dialect)
        except ConnectFailedError as error:
            message = f"cannot open a session with the MCP server `{self._opener.spec}`: {error}"
            raise CallFailedError(FailureClass.TOOL_HOST, message) from error
        return self._connection


@dataclass(frozen=True, slots=True)
class ServerTools:
    """The tools of a server, and the dialect that it accepted."""

    dialect: ServerDialect
    schemas: list[ToolSchema]


async def list_server_tools(opener: SessionOpener) -> ServerTools:
    """Returns the tools of a server, listed in a temporary session.

    Raises:
        ConnectFailedError: the server accepts none of the dialects.
    """
    dialect, first_error = first_dialect(opener.spec), None
    while True:
        try:
            connection = await opener.open(dialect)
            schemas = await connection.list_tools(timeout_s=opener.timeout_s)
        except ConnectFailedError as error:
            # The first dialect is the likeliest one, so its error helps the user most.
            first_error = first_error or error
            next_to_try = next_dialect(dialect, error.code)
            if next_to_try is None:
                raise first_error from None
            dialect = next_to_try
        else:
            await connection.close()
            return ServerTools(dialect, schemas)


def _with_prefix(schema: ToolSchema, prefix: str) -> ToolSchema:
    if not prefix:
        return schema
    function = schema["function"]
    return {"type": "function", "function": {**function, "name": prefix + function["name"]}}


def _unusable_error(spec: ServerSpec, error: ConnectFailedError) -> InputError:
    """Returns the error for a server that cannot be used."""
    fix = (
        "start that server, or correct its URL (most end in /mcp or /sse; some servers accept "
        "localhost only, not 127.0.0.1)"
        if spec.url
        else f"run the command manually in {spec.folder}: it must start, and then "
        f"{'listen on the port in the command' if spec.is_shared else 'wait for input'}"
    )
    return InputError(f"the MCP server `{spec}` cannot be used: {error}", fix)

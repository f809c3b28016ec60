"""One session with an MCP server: opened, asked, and left without a trace."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import anyio

from stillroom.tools.background import Background
from stillroom.tools.base import ToolResult, error_result
from stillroom.tools.mcp.process import LastWords, stdio_streams
from stillroom.tools.mcp.results import result_of, schema_of
from stillroom.tools.mcp.spec import ServerSpec, Way
from stillroom.types import ToolSchema

if TYPE_CHECKING:
    from mcp import Client, MCPError

# A hung HTTP server is left after this; a hung process has its own, shorter grace.
CLOSE_TIMEOUT_S = 3.0
MAX_EVENT_BYTES = 64 << 20
MAX_PAGES = 100


class ConnectFailedError(Exception):
    """No session could be opened. `code` is the protocol's, where the server sent one."""

    def __init__(self, reason: str, *, code: int | None = None) -> None:
        super().__init__(reason, code)
        self.reason, self.code = reason, code

    def __str__(self) -> str:
        return self.reason


class NoAnswerError(ConnectFailedError):
    """The server is there and does not answer in time."""


class ConnectionLostError(Exception):
    """An open session is of no use any more."""


class Connection:
    """A session with a server, held by a task of its own.

    The calls of a rollout come from several tasks, and the SDK's scopes belong to one.
    """

    def __init__(self, spec: ServerSpec, way: Way, background: Background) -> None:
        self._spec, self._way, self._background = spec, way, background
        self._words = LastWords()
        self._scope = anyio.CancelScope()
        self._settled, self._leave, self._done = anyio.Event(), anyio.Event(), anyio.Event()
        self._calls = set[anyio.CancelScope]()
        self._client: Client | None = None
        self._error: Exception | None = None

    async def open(self, *, timeout_s: float) -> None:
        """Connects; what holds the session lives in the background until `close`.

        Raises:
            ConnectFailedError: the server did not start, does not answer, or speaks otherwise.
        """
        self._background.group.start_soon(self._hold)
        try:
            with anyio.fail_after(timeout_s):
                await self._settled.wait()
        except TimeoutError as error:
            await self.close(now=True)
            reason = f"it did not answer within {timeout_s:g} s{self._words.told()}"
            raise NoAnswerError(reason) from error
        except BaseException:
            await self.close(now=True)
            raise
        if self._client is None:
            await self.close()
            raise ConnectFailedError(self._reason(), code=_code_of(self._error)) from self._error
        if self._way.mode == "auto":
            # Servers of that generation may want parts of a call in the headers, which the SDK
            # can only write for tools it has seen.
            await self.list_tools(timeout_s=timeout_s)

    async def list_tools(self, *, timeout_s: float) -> list[ToolSchema]:
        """Returns all tools of the server, in its order.

        Raises:
            ConnectFailedError: it does not say.
        """
        from mcp import MCPError
        from pydantic import ValidationError

        try:
            with anyio.fail_after(timeout_s):
                return await self._list_pages()
        except TimeoutError as error:
            reason = f"it did not list its tools within {timeout_s:g} s"
            await self.close(now=True)
            raise ConnectFailedError(reason + self._words.told()) from error
        except (MCPError, ConnectionLostError, ValidationError) as error:
            await self.close()
            reason = f"it did not list its tools: {error}{self.ending()}{self._words.told()}"
            raise ConnectFailedError(reason) from error
        except BaseException:
            await self.close(now=True)
            raise

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Runs one tool; what the server refuses is a result.

        Raises:
            ConnectionLostError: there is no answer; the session is closed.
        """
        from mcp import MCPError
        from pydantic import ValidationError

        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                with anyio.fail_after(timeout_s):
                    return await self._request(name, arguments)
            except TimeoutError as error:
                await self.close(now=True)
                raise ConnectionLostError(f"no answer within {timeout_s:g} s") from error
            except MCPError as error:
                if self._is_lost(error):
                    await self.close()
                    raise ConnectionLostError("the connection ended") from error
                return error_result(f"{name}: {error.message}")
            except ValidationError as error:
                detail = error.errors(include_url=False, include_input=False)[0]["msg"]
                return error_result(f"{name}: the answer is no tool result ({detail})")
            finally:
                self._calls.discard(scope)
        raise ConnectionLostError("the connection ended")

    async def close(self, *, now: bool = False) -> None:
        """Ends the session, and its process with all that it started; also when cancelled.

        `now`: a process is not given time to end by itself.
        """
        with anyio.CancelScope(shield=True):
            self._leave.set()
            # An HTTP session that is just dropped would stay on the server with all it holds.
            if self._client is not None and (not now or self._way.transport != "stdio"):
                with anyio.move_on_after(CLOSE_TIMEOUT_S):
                    await self._done.wait()
            self._scope.cancel()
            await self._done.wait()

    def ending(self) -> str:
        """Returns how the server's process ended, once it is closed; nothing if we ended it."""
        code = self._words.exit_code
        return "" if code is None else f"; its process ended with code {code}"

    async def _hold(self) -> None:
        from mcp import Client

        try:
            with self._scope:
                async with Client(self._streams(), mode=self._way.mode, cache=None) as client:
                    self._client = client
                    self._settled.set()
                    await self._leave.wait()
        # The SDK lets through whatever a server does wrong, in groups of groups.
        except Exception as error:
            self._error = error
        finally:
            self._client = None
            for call in self._calls:
                call.cancel()
            self._settled.set()
            self._done.set()

    def _streams(self) -> AbstractAsyncContextManager[Any]:
        spec = self._spec
        if self._way.transport == "stdio":
            return stdio_streams(
                spec.command,
                self._words,
                environment=spec.environment,
                folder=spec.folder,
                guard=self._background.guard,
            )
        if self._way.transport == "sse":
            from mcp.client.sse import sse_client

            return sse_client(spec.url)
        from mcp.client.streamable_http import streamable_http_client

        return streamable_http_client(spec.url, max_sse_event_size=MAX_EVENT_BYTES)

    async def _list_pages(self) -> list[ToolSchema]:
        from mcp.types import PaginatedRequestParams

        session = self._opened().session
        found: dict[str, ToolSchema] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            for tool in page.tools:
                found.setdefault(tool.name, schema_of(tool))
            cursor = page.next_cursor
            if not cursor:
                return list(found.values())
        raise ConnectionLostError(f"the list did not end after {MAX_PAGES} pages")

    async def _request(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult

        # Not call_tool: it lists the tools again and refuses results over a detail of their form.
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        return result_of(await self._opened().session.send_request(request, CallToolResult))

    def _opened(self) -> "Client":
        if self._client is None:
            raise ConnectionLostError("the connection ended")
        return self._client

    def _is_lost(self, error: "MCPError") -> bool:
        from mcp.types.jsonrpc import CONNECTION_CLOSED, INVALID_REQUEST

        if self._way.transport == "stdio":
            # The code alone says little: it is any server's to use.
            return self._words.has_ended
        # The SDK's words for a session that the server does not know any more.
        is_forgotten = error.code == INVALID_REQUEST and error.message == "Session terminated"
        return self._done.is_set() or is_forgotten or error.code == CONNECTION_CLOSED

    def _reason(self) -> str:
        leaf = leaf_of(self._error)
        found = str(leaf) or type(leaf).__name__ if leaf else "the connection ended"
        return f"{found}{self.ending()}{self._words.told()}"


def _code_of(error: BaseException | None) -> int | None:
    from mcp import MCPError

    leaf = leaf_of(error)
    return leaf.code if isinstance(leaf, MCPError) else None


def leaf_of(error: BaseException | None) -> BaseException | None:
    """Returns what a group of groups is about: the first error in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

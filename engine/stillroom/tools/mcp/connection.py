"""One session with an MCP server, whose results become text for the model."""

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import anyio

from stillroom import bounds
from stillroom.errors import leaf_of
from stillroom.tools.guard import Background
from stillroom.tools.mcp.server_process import ServerOutput, stdio_streams
from stillroom.tools.mcp.spec import ServerDialect, ServerSpec
from stillroom.tools.source import ToolResult, error_result
from stillroom.types import ToolSchema

if TYPE_CHECKING:
    from mcp import Client, MCPError, types

MAX_RESULT_CHARACTERS = bounds.TOOL_RESULT.limit
# How long an HTTP server may take to close a session. A process has a shorter grace period.
CLOSE_TIMEOUT_S = 3.0
MAX_PAGES = bounds.TOOL_PAGES.limit
_MAX_EVENT_BYTES = bounds.TOOL_LINE.limit


class ConnectFailedError(Exception):
    """No session could be opened; `code` is the JSON-RPC error code, if the server sent one."""

    def __init__(self, reason: str, *, code: int | None = None) -> None:
        super().__init__(reason, code)
        self.reason, self.code = reason, code

    def __str__(self) -> str:
        return self.reason


class NoResponseError(ConnectFailedError):
    """The server runs but does not respond in time."""


class ConnectionLostError(Exception):
    """An open session can no longer be used."""


class Connection:
    """A session with a server, held open by its own background task.

    The SDK's cancel scopes must be entered and exited by the same task, but the calls of a rollout
    come from several tasks.
    """

    def __init__(self, spec: ServerSpec, dialect: ServerDialect, background: Background) -> None:
        self._spec, self._dialect, self._background = spec, dialect, background
        self._output = ServerOutput()
        self._scope = anyio.CancelScope()
        self._open_finished = anyio.Event()  # set also if opening has failed
        self._close_requested, self._closed = anyio.Event(), anyio.Event()
        self._calls = set[anyio.CancelScope]()
        self._client: Client | None = None
        self._error: Exception | None = None

    async def open(self, *, timeout_s: float) -> None:
        """Connects; a background task then keeps the session open until `close`.

        Raises:
            ConnectFailedError: the server did not start, did not answer, or rejected the dialect.
        """
        self._background.group.start_soon(self._run)
        try:
            with anyio.fail_after(timeout_s):
                await self._open_finished.wait()
        except TimeoutError as error:
            await self.close(now=True)
            reason = f"it timed out after {timeout_s:g} s{self._output.error_suffix()}"
            raise NoResponseError(reason) from error
        except BaseException:
            await self.close(now=True)
            raise
        if self._client is None:
            await self.close()
            reason = self._failure_reason()
            raise ConnectFailedError(reason, code=_code_of(self._error)) from self._error
        if self._dialect.mode == "auto":
            # Servers of the new protocol generation may need parts of a call in HTTP headers, and
            # the SDK can write those only for tools that it has listed.
            await self.list_tools(timeout_s=timeout_s)

    async def list_tools(self, *, timeout_s: float) -> list[ToolSchema]:
        """Returns all tools of the server, in the server's order.

        Raises:
            ConnectFailedError: the server did not list them; the session is closed.
        """
        from mcp import MCPError
        from pydantic import ValidationError

        try:
            with anyio.fail_after(timeout_s):
                return await self._list_pages()
        except TimeoutError as error:
            reason = f"listing its tools timed out after {timeout_s:g} s"
            await self.close(now=True)
            raise ConnectFailedError(reason + self._output.error_suffix()) from error
        except (MCPError, ConnectionLostError, ValidationError) as error:
            await self.close()
            suffix = f"{self.exit_suffix()}{self._output.error_suffix()}"
            reason = f"listing its tools failed: {error}{suffix}"
            raise ConnectFailedError(reason) from error
        except BaseException:
            await self.close(now=True)
            raise

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Runs one tool within its deadline; an error from the server becomes an error result.

        Raises:
            ConnectionLostError: no answer came in time, or the connection ended; the session is
                closed.
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
                raise ConnectionLostError(f"timed out after {timeout_s:g} s") from error
            except MCPError as error:
                if self._is_lost(error):
                    await self.close()
                    raise ConnectionLostError("the connection ended") from error
                return error_result(f"{name}: {error.message}")
            except ValidationError as error:
                detail = error.errors(include_url=False, include_input=False)[0]["msg"]
                return error_result(f"{name}: the response is not a valid tool result ({detail})")
            finally:
                self._calls.discard(scope)
        raise ConnectionLostError("the connection ended")

    async def close(self, *, now: bool = False) -> None:
        """Ends the session and the processes of its server, also when cancelled.

        With `now`, the process gets no time to exit by itself.
        """
        with anyio.CancelScope(shield=True):
            self._close_requested.set()
            # An HTTP session that is only dropped would stay open on the server.
            if self._client is not None and (not now or self._dialect.transport != "stdio"):
                with anyio.move_on_after(CLOSE_TIMEOUT_S):
                    await self._closed.wait()
            self._scope.cancel()
            await self._closed.wait()

    def exit_suffix(self) -> str:
        """Returns the exit code as a suffix for an error; empty if no process exited by itself.

        This is known only after `close`.
        """
        code = self._output.exit_code
        return "" if code is None else f"; its process exited with code {code}"

    async def _run(self) -> None:
        """Opens the session and holds it open until `close`."""
        from mcp import Client

        try:
            with self._scope:
                async with Client(self._streams(), mode=self._dialect.mode, cache=None) as client:
                    self._client = client
                    self._open_finished.set()
                    await self._close_requested.wait()
        # The SDK raises all kinds of errors for what a server does wrong, in nested groups.
        except Exception as error:
            self._error = error
        finally:
            self._client = None
            for call in self._calls:
                call.cancel()
            self._open_finished.set()
            self._closed.set()

    def _streams(self) -> AbstractAsyncContextManager[Any]:
        """Returns the streams of the dialect's transport."""
        spec = self._spec
        if self._dialect.transport == "stdio":
            return stdio_streams(
                spec.command,
                self._output,
                environment=spec.environment,
                folder=spec.folder,
                guard=self._background.guard,
            )
        if self._dialect.transport == "sse":
            from mcp.client.sse import sse_client

            return sse_client(spec.url)
        from mcp.client.streamable_http import streamable_http_client

        return streamable_http_client(spec.url, max_sse_event_size=_MAX_EVENT_BYTES)

    async def _list_pages(self) -> list[ToolSchema]:
        """Returns the tools on all pages of the list."""
        from mcp.types import PaginatedRequestParams

        session = self._open_client().session
        schemas: dict[str, ToolSchema] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            for tool in page.tools:
                schemas.setdefault(tool.name, _schema_of(tool))
            cursor = page.next_cursor
            if not cursor:
                return list(schemas.values())
        raise ConnectionLostError(f"the tool list has more than {MAX_PAGES} pages")

    async def _request(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult

        # The SDK's call_tool would list the tools again, and reject results for details of form.
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        return _result_of(await self._open_client().session.send_request(request, CallToolResult))

    def _open_client(self) -> "Client":
        if self._client is None:
            raise ConnectionLostError("the connection ended")
        return self._client

    def _is_lost(self, error: "MCPError") -> bool:
        """Returns whether an error means that the session can no longer be used."""
        from mcp.types.jsonrpc import CONNECTION_CLOSED, INVALID_REQUEST

        if self._dialect.transport == "stdio":
            # The error code alone proves little, since any server may use it.
            return self._output.has_ended
        # This is how the SDK reports that the server no longer knows the session.
        is_forgotten = error.code == INVALID_REQUEST and error.message == "Session terminated"
        return self._closed.is_set() or is_forgotten or error.code == CONNECTION_CLOSED

    def _failure_reason(self) -> str:
        """Returns the reason why the session was not opened."""
        leaf = leaf_of(self._error)
        problem = str(leaf) or type(leaf).__name__ if leaf else "the connection ended"
        return f"{problem}{self.exit_suffix()}{self._output.error_suffix()}"


def _code_of(error: BaseException | None) -> int | None:
    from mcp import MCPError

    leaf = leaf_of(error)
    return leaf.code if isinstance(leaf, MCPError) else None


def _schema_of(tool: "types.Tool") -> ToolSchema:
    """Returns a tool's schema for the model, with the server's parameters unchanged."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _result_of(result: "types.CallToolResult") -> ToolResult:
    """Returns a tool's result as text for the model.

    Images, audio and binary resources are replaced with their type and size.
    """
    text = "\n".join(map(_block_text, result.content))
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if len(text) > MAX_RESULT_CHARACTERS:
        text = f"{text[:MAX_RESULT_CHARACTERS]}… (cut; {len(text)} characters in all)"
    return ToolResult(content=text, is_error=bool(result.is_error))


def _block_text(block: "types.ContentBlock") -> str:
    """Returns a block of a result as text."""
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type} {block.mime_type}, {_num_bytes(block.data)} bytes]"
        case "resource_link":
            return _bracketed(["resource", str(block.uri), block.mime_type], block.size)
        case "resource":
            return _resource_text(block.resource)


def _resource_text(
    resource: "types.TextResourceContents | types.BlobResourceContents",
) -> str:
    """Returns an embedded resource as text."""
    text: str | None = getattr(resource, "text", None)
    labels = ["resource", str(resource.uri), resource.mime_type]
    if text is not None:
        return f"{_bracketed(labels, len(text.encode('utf-8')))}\n{text}"
    return _bracketed(labels, _num_bytes(getattr(resource, "blob", "")))


def _bracketed(labels: Sequence[str | None], num_bytes: int | None) -> str:
    size = "" if num_bytes is None else f", {num_bytes} bytes"
    return f"[{' '.join(filter(None, labels))}{size}]"


def _num_bytes(base64_text: str) -> int:
    return len(base64_text.rstrip("=")) * 3 // 4

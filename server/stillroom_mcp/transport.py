"""The server's standard output, which no message can break."""

import dataclasses
from types import TracebackType
from typing import Any, Protocol, Self

from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError


class StdioServer(MCPServer):
    """An MCP server that answers over standard output whatever an answer holds."""

    async def run_stdio_async(self) -> None:
        """Serves one client until its input ends."""
        async with stdio_server() as (incoming, outgoing):
            server = self._lowlevel_server
            options = server.create_initialization_options()
            await server.run(incoming, _EncodableMessages(outgoing), options)


class _Outgoing(Protocol):
    async def send(self, item: SessionMessage, /) -> None: ...

    async def aclose(self) -> None: ...


class _EncodableMessages:
    """Passes messages on, after it has made sure that each can be written as JSON.

    The task that writes them ends at the first that cannot, and then no call is answered any more.
    A file's name that is not UTF-8, for one, is a text that JSON cannot hold.
    """

    def __init__(self, outgoing: _Outgoing) -> None:
        self._outgoing = outgoing

    async def send(self, item: SessionMessage, /) -> None:
        await self._outgoing.send(encodable(item))

    async def aclose(self) -> None:
        await self._outgoing.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.aclose()


def encodable(item: SessionMessage) -> SessionMessage:
    """Returns a message that can be written as JSON: with escapes for what is no Unicode.

    If even that cannot be written, it is an error in place of the answer.
    """
    message = item.message
    try:
        _encode(message)
        return item
    except (ValueError, RecursionError) as error:
        reason = type(error).__name__
    try:
        plain = message.model_dump(by_alias=True, exclude_unset=True)
        escaped = type(message).model_validate(_escaped(plain), by_name=False)
        _encode(escaped)
    except (ValueError, RecursionError):
        data = ErrorData(code=INTERNAL_ERROR, message=f"the answer is no JSON ({reason})")
        escaped = JSONRPCError(jsonrpc="2.0", id=getattr(message, "id", None), error=data)
    return dataclasses.replace(item, message=escaped)


def _encode(message: Any) -> None:
    message.model_dump_json(by_alias=True, exclude_unset=True)


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
        case dict():
            return {_escaped(key): _escaped(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_escaped(inner) for inner in value]
        case _:
            return value

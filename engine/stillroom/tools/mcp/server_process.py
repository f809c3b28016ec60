"""Runs the process of an MCP server, and stops its whole process tree."""

import json
import os
import signal
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.abc
import anyio.to_thread
from anyio.abc import ByteReceiveStream, ByteSendStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from stillroom import bounds
from stillroom.processes import (
    SERVER_MARK_VARIABLE,
    descendants,
    kill,
    kill_family,
    kill_marked,
)
from stillroom.tools.guard import Guard

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage

MAX_LINE_BYTES = bounds.TOOL_LINE.limit
_MAX_LAST_OUTPUT_BYTES = bounds.TOOL_ERRORS.limit
# How long a server may take to end by itself once its input is closed, as MCP demands.
_GRACE_S = 1.0
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.01
_WATCH_S = 0.1

_DISCONNECTED = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)

_Streams = tuple[
    "MemoryObjectReceiveStream[SessionMessage | Exception]",
    "MemoryObjectSendStream[SessionMessage]",
]
_Sink = MemoryObjectSendStream["SessionMessage | Exception"]
_Source = MemoryObjectReceiveStream["SessionMessage"]


@dataclass(slots=True)
class ServerOutput:
    """The last lines that a server printed outside the protocol, and its exit code, for errors."""

    exit_code: int | None = None
    """The exit code of a process that exited by itself; None if it runs or was killed."""
    has_ended: bool = False
    """Whether the server can send no further output."""
    _tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        """Adds output; only the last 4 kB are kept."""
        self._tail += data
        del self._tail[:-_MAX_LAST_OUTPUT_BYTES]

    def __str__(self) -> str:
        lines = bytes(self._tail).decode("utf-8", errors="replace").split("\n")
        return "\n".join(line.rstrip() for line in lines if line.strip())

    def error_suffix(self) -> str:
        """Returns the last output as a suffix for an error message; empty if there was none."""
        text = str(self)
        return f"; its last output:\n{text}" if text else ""


@asynccontextmanager
async def server_process(
    command: Sequence[str],
    output: ServerOutput,
    *,
    environment: Mapping[str, str],
    folder: Path,
    guard: Guard,
) -> AsyncGenerator[anyio.abc.Process]:
    """Starts a server; at the end of the block, stops its whole process tree.

    Raises:
        OSError: the command cannot be run.
    """
    mark = uuid.uuid4().hex
    # No await between this and `try`: a cancellation there would leave the process running.
    process = await anyio.open_process(
        command,
        env={**environment, SERVER_MARK_VARIABLE: mark},
        cwd=folder,
        start_new_session=True,
    )
    grace_s = _GRACE_S
    try:
        await guard.watch(process.pid, mark)
        yield process
    except anyio.get_cancelled_exc_class():
        # Either the server hangs, or everything must end immediately.
        grace_s = 0.0
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process, output, mark, grace_s=grace_s)
            await guard.unwatch(process.pid, mark)


@asynccontextmanager
async def stdio_streams(
    command: Sequence[str],
    output: ServerOutput,
    *,
    environment: Mapping[str, str],
    folder: Path,
    guard: Guard,
) -> AsyncGenerator[_Streams]:
    """Starts a server and yields the streams of its messages, for one session.

    Raises, in a group:
        OSError: the command cannot be run.
    """
    to_session, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, from_session = anyio.create_memory_object_stream[Any](0)
    with to_session, from_session, incoming, outgoing:
        # The group is around the process, so that its last output is read while it ends.
        async with anyio.create_task_group() as group:
            async with server_process(
                command, output, environment=environment, folder=folder, guard=guard
            ) as process:
                stdin = cast("ByteSendStream", process.stdin)
                group.start_soon(_receive, process.stdout, to_session, output)
                group.start_soon(_send, from_session, stdin, to_session)
                group.start_soon(_watch, process, to_session, output)
                group.start_soon(keep_output, process.stderr, output)
                with incoming, outgoing:
                    yield incoming, outgoing
            group.cancel_scope.cancel()


async def _receive(stdout: ByteReceiveStream | None, session: _Sink, output: ServerOutput) -> None:
    """Passes the server's messages to the session, and closes the session after the last one."""
    from mcp.shared.message import SessionMessage

    lines = BufferedByteReceiveStream(cast("ByteReceiveStream", stdout))
    try:
        while True:
            line = await lines.receive_until(b"\n", MAX_LINE_BYTES)
            message = _parse_message(line)
            if message is None:
                output.add(line[-_MAX_LAST_OUTPUT_BYTES:] + b"\n")
            else:
                await session.send(SessionMessage(message))
    except anyio.DelimiterNotFound:
        output.add(f"it wrote a line of more than {MAX_LINE_BYTES >> 20} MB\n".encode())
    except (*_DISCONNECTED, anyio.IncompleteRead):
        pass
    finally:
        output.has_ended = True
        session.close()


def _parse_message(line: bytes) -> Any:
    """Returns the message in a line; None if the line is not a message of the protocol."""
    from mcp.types.jsonrpc import jsonrpc_message_adapter

    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        pass
    try:
        # JavaScript may cut a text inside a character and escape half a surrogate pair.
        fixed = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", errors="replace")
        return jsonrpc_message_adapter.validate_json(fixed, by_name=False)
    except (ValueError, RecursionError):
        return None


async def _send(session: _Source, stdin: ByteSendStream, incoming: _Sink) -> None:
    """Writes the session's messages to the server, and closes the session if it cannot."""
    try:
        async for message in session:
            data = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await stdin.send(data.encode("utf-8") + b"\n")
    except _DISCONNECTED:
        # The server may still run, but without its input it will answer no request.
        incoming.close()


async def _watch(process: anyio.abc.Process, session: _Sink, output: ServerOutput) -> None:
    """Closes the session once the server's process has exited.

    The end of its output is not enough, since a child process may keep the pipes open.
    """
    while process.returncode is None:  # noqa: ASYNC110 - a process sets no event
        await anyio.sleep(_WATCH_S)
    # Leaves time to read its last output.
    await anyio.sleep(_WATCH_S)
    output.has_ended = True
    session.close()


async def keep_output(stream: ByteReceiveStream | None, output: ServerOutput) -> None:
    """Reads a server's output stream to its end, and keeps the last lines in `output`."""
    with suppress(*_DISCONNECTED):
        while stream is not None:
            output.add(await stream.receive())


async def _stop(
    process: anyio.abc.Process, output: ServerOutput, mark: str, *, grace_s: float
) -> None:
    """Asks the server to end by closing its input, then kills the rest of its process tree."""
    # The pid of a process that has ended may belong to another program by now.
    has_ended = process.returncode is not None
    family = [] if has_ended else descendants(process.pid)
    is_orphaned = not family
    with suppress(*_DISCONNECTED):
        await cast("ByteSendStream", process.stdin).aclose()
    if await _has_exited(process, within_s=grace_s):
        output.exit_code = process.returncode
        if not has_ended:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    else:
        kill_family(process.pid)
    for descendant in family:
        kill(descendant)
    if is_orphaned:
        # The server ended before its children could be listed, so only the mark finds them now.
        await anyio.to_thread.run_sync(kill_marked, {mark})
    # Not process.wait(): it may wait for the pipes, which another process could hold open.
    if await _has_exited(process, within_s=_KILL_TIMEOUT_S):
        await process.aclose()


async def _has_exited(process: anyio.abc.Process, *, within_s: float) -> bool:
    with anyio.move_on_after(within_s):
        while process.returncode is None:  # noqa: ASYNC110 - a process sets no event
            await anyio.sleep(_POLL_S)
    return process.returncode is not None

"""Opens sessions with one MCP server: a process for each, one process for all, or a URL."""

import os
import socket

import anyio
import anyio.abc

from stillroom.errors import leaf_of
from stillroom.tools.guard import Background
from stillroom.tools.mcp.connection import ConnectFailedError, Connection, NoResponseError
from stillroom.tools.mcp.server_process import ServerOutput, keep_output, server_process
from stillroom.tools.mcp.spec import ServerDialect, ServerSpec

_POLL_S, _CONNECT_TIMEOUT_S = 0.05, 1.0
# More starts at a time slow one another down, and delay even the first.
_STARTS_PER_CPU = 2


class SessionOpener:
    """Opens sessions with a server, and limits how many of its processes start at once."""

    def __init__(self, spec: ServerSpec, background: Background, *, timeout_s: float) -> None:
        self.spec, self.timeout_s = spec, timeout_s
        self._background = background
        self._starts = anyio.Semaphore(_STARTS_PER_CPU * (os.cpu_count() or 1))
        self._shared = _SharedServer(spec, background) if spec.is_shared else None

    async def open(self, dialect: ServerDialect) -> Connection:
        """Returns an open session.

        Raises:
            ConnectFailedError: the server did not start, did not answer, or rejected the dialect.
        """
        if self._shared is not None:
            return await self._open_shared(self._shared, dialect)
        connection = Connection(self.spec, dialect, self._background)
        if dialect.transport != "stdio":
            await connection.open(timeout_s=self.timeout_s)
            return connection
        async with self._starts:
            await connection.open(timeout_s=self.timeout_s)
        return connection

    async def close(self) -> None:
        """Stops the process that serves all sessions, if any."""
        if self._shared is not None:
            await self._shared.stop()

    async def _open_shared(self, shared: "_SharedServer", dialect: ServerDialect) -> Connection:
        """Opens a session with the process that serves all sessions, started if necessary."""
        spec = await shared.ensure_running(timeout_s=self.timeout_s)
        try:
            return await self._open_session(spec, dialect)
        except NoResponseError:
            # The process hangs for all sessions, so the next one gets a new process.
            await shared.stop(spec)
            raise
        except ConnectFailedError:
            if not await shared.has_stopped(spec):
                raise
        # The process had died unnoticed, so this tries once more with a new one.
        spec = await shared.ensure_running(timeout_s=self.timeout_s)
        return await self._open_session(spec, dialect)

    async def _open_session(self, spec: ServerSpec, dialect: ServerDialect) -> Connection:
        connection = Connection(spec, dialect, self._background)
        await connection.open(timeout_s=self.timeout_s)
        return connection


class _SharedServer:
    """The single process of a server that serves all sessions on a port.

    If it exits, the next session restarts it.
    """

    def __init__(self, spec: ServerSpec, background: Background) -> None:
        self._spec, self._background = spec, background
        self._lock = anyio.Lock()
        self._process: _ListeningProcess | None = None

    async def ensure_running(self, *, timeout_s: float) -> ServerSpec:
        """Returns the server's spec with its URL once it listens; starts it if necessary.

        Raises:
            ConnectFailedError: the server does not start.
        """
        async with self._lock:
            if self._process is not None and self._process.has_ended:
                # Processes that it started may still be running.
                process, self._process = self._process, None
                await process.stop()
            if self._process is None:
                port = _free_port()
                process = _ListeningProcess(self._spec.at_port(port), port, self._background)
                await process.start(timeout_s=timeout_s)
                self._process = process
            return self._process.spec

    async def has_stopped(self, spec: ServerSpec) -> bool:
        """Returns whether the process behind `spec` has exited or no longer listens.

        A process that no longer listens is stopped.
        """
        async with self._lock:
            process = self._process
            if process is None or process.spec != spec:
                return True
            if process.has_ended or not await process.listens():
                self._process = None
                await process.stop()
            return self._process is None

    async def stop(self, spec: ServerSpec | None = None) -> None:
        """Stops the process; if `spec` is given, only if it is still the process behind `spec`."""
        async with self._lock:
            if self._process is not None and spec in (None, self._process.spec):
                process, self._process = self._process, None
                await process.stop()


class _ListeningProcess:
    """A server's process, held by a background task."""

    def __init__(self, spec: ServerSpec, port: int, background: Background) -> None:
        self.spec, self._port, self._background = spec, port, background
        self._output = ServerOutput()
        self._stop_requested, self._stopped = anyio.Event(), anyio.Event()
        self._process: anyio.abc.Process | None = None
        self._error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the process or its background task has ended."""
        process = self._process
        return self._stopped.is_set() or (process is not None and process.returncode is not None)

    async def start(self, *, timeout_s: float) -> None:
        """Starts the process and returns when it listens.

        Raises:
            ConnectFailedError: the process ended, or does not listen in time.
        """
        self._background.group.start_soon(self._run)
        has_ended = False
        try:
            with anyio.move_on_after(timeout_s):
                while not (has_ended := self.has_ended):
                    if await self.listens():
                        return
                    await anyio.sleep(_POLL_S)
        except BaseException:
            await self.stop()
            raise
        await self.stop()
        timeout_reason = f"it did not listen on port {self._port} within {timeout_s:g} s"
        raise ConnectFailedError(
            self._exit_reason() if has_ended else timeout_reason + self._output.error_suffix()
        )

    async def stop(self) -> None:
        """Stops the process tree, also when cancelled."""
        with anyio.CancelScope(shield=True):
            self._stop_requested.set()
            await self._stopped.wait()

    async def _run(self) -> None:
        """Runs the process until `stop`."""
        spec, output, guard = self.spec, self._output, self._background.guard
        try:
            async with anyio.create_task_group() as group:
                async with server_process(
                    spec.command,
                    output,
                    environment=spec.environment,
                    folder=spec.folder,
                    guard=guard,
                ) as process:
                    self._process = process
                    group.start_soon(keep_output, process.stdout, output)
                    group.start_soon(keep_output, process.stderr, output)
                    await self._stop_requested.wait()
                group.cancel_scope.cancel()
        except* OSError as errors:
            self._error = leaf_of(errors)
        finally:
            self._stopped.set()

    async def listens(self) -> bool:
        """Returns whether the port does not refuse connections.

        True also if connecting takes longer than a second, since the server may be busy.
        """
        with anyio.move_on_after(_CONNECT_TIMEOUT_S):
            try:
                stream = await anyio.connect_tcp("localhost", self._port)
            except OSError:
                return False
            await stream.aclose()
        return True

    def _exit_reason(self) -> str:
        if self._error is not None:
            return str(self._error)
        return f"its process exited with code {self._output.exit_code}{self._output.error_suffix()}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

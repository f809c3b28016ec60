"""Serves the proxy or a replay on a socket until the process is stopped."""

import asyncio
import functools
import logging
import resource
import signal
import socket
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import cast

from aiohttp import web
from aiohttp.hdrs import CONTENT_TYPE, DATE, SERVER
from aiohttp.http import RawRequestMessage
from aiohttp.typedefs import Handler

from stillroom import bounds
from stillroom.recording.admission import Admission, RefusedError
from stillroom.recording.headers import Headers, RequestHead

_LONGEST_LINE = bounds.REQUEST_LINE.limit
"""The maximum number of bytes of a request line, and of each header."""
_MAX_HEADERS = bounds.REQUEST_HEADERS.limit
_KEEP_ALIVE_S = float(bounds.IDLE.limit)
_LINGER_S = 2.0
"""Seconds for which the rest of a request is read after an early response."""
_CANCEL_S = 0.02
"""Seconds to wait for open requests before they are cancelled."""
_POLL_S = 0.02
_MAX_FILES = 1 << 16
_STOP_S = 10.0
"""The grace period in seconds for open calls when the process is stopped."""
_PASSED_HEADERS = web.RequestKey("passed_headers", Headers)


class Service(ABC):
    """An HTTP service that counts its open requests."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.num_open = 0
        """The number of requests in progress."""
        self.is_stopping = False
        self.is_cancelling = False
        """Whether requests are cancelled because the process stops, not because clients left."""

    @abstractmethod
    async def respond(self, request: web.Request, head: RequestHead) -> web.StreamResponse:
        """Answers a request; `head.target` has no token. Raises RefusedError."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes the files and connections of the service."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers a request, or refuses it if it is not admitted."""
        self.num_open += 1
        try:
            response = await self._admit_and_respond(request)
        except RefusedError as refusal:
            response = refusal.response()
        except ConnectionError:
            raise
        except Exception as error:  # outermost handler; the error's text may hold keys
            _report(error)
            abort(request)
            return web.Response()
        finally:
            self.num_open -= 1
        if self.is_stopping:
            response.force_close()
        return response

    async def _admit_and_respond(self, request: web.Request) -> web.StreamResponse:
        head = RequestHead.of(request)
        own_address = str((request.get_extra_info("sockname") or ("",))[0])
        target = self._admission.admit(head, own_address)
        return await self.respond(request, RequestHead(head.method, target, head.headers))


def _report(error: Exception) -> None:
    """Writes an unexpected error to standard error, without its text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{frame.filename}:{frame.lineno}"
    sys.stderr.write(f"stillroom record: {type(error).__name__} at {line}; please report it\n")
    sys.stderr.flush()


def response_with(
    request: web.Request, status: int, reason: str, headers: Headers
) -> web.StreamResponse:
    """Returns a response with exactly these headers, and those that frame its body."""
    request[_PASSED_HEADERS] = headers
    return web.StreamResponse(status=status, reason=reason, headers=headers)


async def _drop_own_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Removes the headers that aiohttp adds to every response."""
    passed = request.get(_PASSED_HEADERS)
    added = (SERVER, DATE) if passed is None else (SERVER, DATE, CONTENT_TYPE)
    for name in added:
        if passed is None or name not in passed:
            response.headers.popall(name, None)


def abort(request: web.Request) -> None:
    """Resets the connection, so that the client sees an incomplete reply."""
    if request.transport is not None:
        request.transport.abort()


def cut_off(request: web.Request, response: web.StreamResponse) -> None:
    """Ends an incomplete reply after the part that was sent, and closes its connection.

    A reply with neither Content-Length nor chunks looks incomplete to a client only after a reset.
    """
    is_framed = response.content_length is not None or "transfer-encoding" in response.headers
    if not is_framed:
        abort(request)
    elif request.transport is not None:
        request.transport.close()


class _RequestProtocol(web.RequestHandler):
    """Closes the connection of a request whose body is not valid HTTP.

    aiohttp would wait for the rest of the body, and the client for a reply.
    """

    def data_received(self, data: bytes) -> None:
        """Parses bytes from the connection."""
        super().data_received(data)
        if not self._messages or isinstance(self._messages[-1][0], RawRequestMessage):
            return
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        if self.transport is not None and not all(body.is_eof() for body in bodies):
            self.transport.close()


@asynccontextmanager
async def running(
    service: Service, listener: socket.socket
) -> AsyncGenerator[asyncio.AbstractServer]:
    """Serves requests on a socket; on exit, cancels those that are still open."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await service.handle(request)

    # A middleware instead of a route: no route matches the targets of some refused requests.
    app = web.Application(middlewares=[answer])
    app.on_response_prepare.append(_drop_own_headers)
    silent = logging.Logger("stillroom.recording")
    silent.disabled = True
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CANCEL_S)
    await runner.setup()
    loop = asyncio.get_running_loop()
    connection = functools.partial(
        _RequestProtocol,
        cast("web.Server", runner.server),
        loop=loop,
        access_log=silent,
        # The parser's errors quote the request, which may contain keys.
        logger=silent,
        auto_decompress=False,
        keepalive_timeout=_KEEP_ALIVE_S,
        lingering_time=_LINGER_S,
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_LINE,
        max_headers=_MAX_HEADERS,
    )
    server = await loop.create_server(connection, sock=listener, backlog=4096)
    try:
        yield server
    finally:
        service.is_stopping = service.is_cancelling = True
        server.close()
        await runner.cleanup()
        # Cancelled requests are recorded as cancelled.
        await asyncio.sleep(0)
        await service.aclose()


def run_until_stopped(
    service: Service, listener: socket.socket, *, stop_s: float = _STOP_S
) -> None:
    """Serves until SIGINT or SIGTERM; a second signal cancels the open requests."""
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(service, listener, stop_s))


def _raise_file_limit() -> None:
    """Increases the limit of open files as far as possible: each call needs two connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS enforces a lower limit than it reports.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _new_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop of uvloop if that is installed."""
    try:
        import uvloop
    except ImportError:
        # uvloop does not support Windows.
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(service: Service, listener: socket.socket, stop_s: float) -> None:
    """Serves requests until the process is stopped, and waits for open ones to end."""
    loop = asyncio.get_running_loop()
    stop_requested, cancel_requested = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (cancel_requested if stop_requested.is_set() else stop_requested).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    async with running(service, listener) as server:
        await stop_requested.wait()
        service.is_stopping = True
        server.close()
        if service.num_open:
            sys.stderr.write(
                f"stillroom record: waiting up to {stop_s:g} s for {service.num_open} calls to end "
                "(send a second signal to cancel them)\n"
            )
            sys.stderr.flush()
        deadline = loop.time() + stop_s
        while service.num_open and not cancel_requested.is_set() and loop.time() < deadline:
            with suppress(TimeoutError):
                await asyncio.wait_for(cancel_requested.wait(), _POLL_S)

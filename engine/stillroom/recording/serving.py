"""Runs the proxy, or a replay, at a socket until the process is asked to stop."""

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stillroom.recording.answering import Front
from stillroom.recording.client_side import ClientConnection

_LOOK_EVERY_S = 0.02
_MOST_FILES = 1 << 16
_SWITCH_S = 0.0002
_FLUSH_S = 0.05
_STOP_S = 10.0
"""Seconds that calls have to end once the process is asked to stop."""


def run_until_stopped(
    make: Callable[[asyncio.AbstractEventLoop], Front],
    listener: socket.socket,
    *,
    stop_s: float = _STOP_S,
) -> None:
    """Serves at a socket until SIGINT or SIGTERM; a second signal ends what is still going on."""
    _allow_files()
    # The journal's thread has little to do between two waits for the disk, and clients wait for it.
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(make, listener, stop_s))


def _allow_files() -> None:
    """Lets the process open as many files as it may: each call has two connections."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has a limit of its own below the one that it names.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        # It has no version for Windows.
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(
    make: Callable[[asyncio.AbstractEventLoop], Front], listener: socket.socket, stop_s: float
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report)
    served = make(loop)
    stopping, breaking = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (breaking if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    server = await loop.create_server(lambda: ClientConnection(served), sock=listener, backlog=4096)
    await stopping.wait()
    served.is_stopping = True
    server.close()
    if served.num_open:
        sys.stderr.write(
            f"stillroom record: waiting up to {stop_s:g} s for {served.num_open} calls to end "
            "(once more breaks them off)\n"
        )
        sys.stderr.flush()
    deadline = loop.time() + stop_s
    while served.num_open and not breaking.is_set() and loop.time() < deadline:
        with suppress(TimeoutError):
            await asyncio.wait_for(breaking.wait(), _LOOK_EVERY_S)
    served.stop()
    # What has been written may still lie in the connections' buffers.
    await asyncio.sleep(_FLUSH_S)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Says where an error of ours happened; what it was about may hold keys."""
    error = context.get("exception")
    place = ""
    if isinstance(error, BaseException) and error.__traceback__ is not None:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    sys.stderr.write(f"stillroom record: {type(error).__name__}{place}; please report it\n")
    sys.stderr.flush()

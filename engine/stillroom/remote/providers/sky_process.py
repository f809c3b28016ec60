"""`python -m stillroom.remote.providers.sky_process`: SkyPilot's calls in a process of its own.

The package is large and prints to standard output, which belongs to the MCP connection in a
server. The calls come and their answers go as frames, so what it prints cannot break them.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, cast

import msgspec

from stillroom.errors import EngineError, MissingExtraError
from stillroom.processes import end_process
from stillroom.remote.channel import read_errors, start_process
from stillroom.remote.frames import BrokenStreamError, Frames
from stillroom.remote.host import UnreachableError
from stillroom.remote.providers.sky_calls import ClusterView, Offer, Outcome, SkyCalls
from stillroom.remote.records import SkyPilotCluster
from stillroom.secrecy.environments import renting_environment

_CALL_LIMIT_S = 1800.0
_END_WAIT_S = 5.0
_LONGEST = 600
_UNREACHABLE = UnreachableError.__name__


class _Call(msgspec.Struct, frozen=True):
    """A call of one of the methods of `SkyCalls`."""

    method: str
    arguments: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call returned, or the error that it raised."""

    value: Any = None
    problem: str | None = None
    fix: str = ""
    kind: str = ""
    """Which of our errors it is, by the name of its class."""


class SkyProcess:
    """The same calls as `SkyCalls`, made in a process that is started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def launch(self, name: str, cluster: SkyPilotCluster, *, folder: str) -> str:
        """Asks for a cluster; returns the request's id."""
        return self._call(str, "launch", name=name, cluster=cluster, folder=folder)

    def outcome(self, request_id: str) -> Outcome:
        """Returns how a request stands."""
        return cast("Outcome", self._call(str, "outcome", request_id=request_id))

    def raise_failure(self, request_id: str, name: str) -> None:
        """Raises the error that a failed request ended with."""
        self._call(None, "raise_failure", request_id=request_id, name=name)

    def look(self, name: str) -> ClusterView | None:
        """Returns how a cluster stands at its provider; None if it does not exist there."""
        return self._call(ClusterView | None, "look", name=name)

    def hold(self, name: str, *, folder: str) -> None:
        """Gives the cluster a job that lasts as long as anything of ours runs there."""
        self._call(None, "hold", name=name, folder=folder)

    def release(self, name: str) -> None:
        """Deletes the cluster, and returns when it is gone; there may be none."""
        self._call(None, "release", name=name)

    def offer(self, cluster: SkyPilotCluster) -> Offer | None:
        """Returns the cheapest machine with the wanted accelerators in the user's clouds."""
        return self._call(Offer | None, "offer", cluster=cluster)

    def write_ssh_entry(self, name: str) -> None:
        """Writes the cluster's entry for ssh."""
        self._call(None, "write_ssh_entry", name=name)

    def close(self) -> None:
        """Ends the process; what it has asked SkyPilot for goes on."""
        with self._one_at_a_time:
            self._end()

    def _call(self, kind: Any, method: str, **arguments: Any) -> Any:
        with self._one_at_a_time:
            answer = self._ask(_Call(method, msgspec.to_builtins(arguments)))
        if answer.problem is None:
            return msgspec.convert(answer.value, kind)
        kinds = {each.__name__: each for each in (UnreachableError, MissingExtraError)}
        raise kinds.get(answer.kind, EngineError)(answer.problem, answer.fix)

    def _ask(self, call: _Call) -> _Answer:
        process = self._started()
        frames = Frames(cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stdin))
        # SkyPilot waits for its own server, and that for a cloud, without a limit.
        limit = threading.Timer(_CALL_LIMIT_S, process.kill)
        limit.start()
        try:
            frames.send(call)
            answer = frames.receive(_Answer)
        except BrokenStreamError as broken:
            printed = read_errors(process) or str(broken)
            self._end()
            raise UnreachableError(
                f"the process that calls SkyPilot ended: {printed[-_LONGEST:]}",
                "nothing: it is started again; if it stays so, run `sky check` in a terminal",
            ) from broken
        finally:
            limit.cancel()
        return answer or _Answer(problem="SkyPilot's process gave no answer", kind=_UNREACHABLE)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [sys.executable, "-P", "-m", __name__]
            self._process = start_process(command, renting_environment())
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                cast("IO[bytes]", stream).close()
        try:
            process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            end_process(process)


def main() -> int:
    """Answers calls until nobody listens any more."""
    frames = Frames(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    # What the package prints goes to standard error, and what it starts reads nothing.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    calls: SkyCalls | None = None
    try:
        while (call := frames.receive(_Call)) is not None:
            try:
                calls = calls or SkyCalls()
                answer = _Answer(value=msgspec.to_builtins(_made(calls, call)))
            except EngineError as error:
                answer = _Answer(problem=error.problem, fix=error.fix, kind=type(error).__name__)
            frames.send(answer)
    except BrokenStreamError:
        pass  # Nobody listens any more.
    return 0


def _made(calls: SkyCalls, call: _Call) -> Any:
    """Makes a call and returns what it returns."""
    methods: dict[str, Callable[..., Any]] = {
        "launch": calls.launch,
        "outcome": calls.outcome,
        "raise_failure": calls.raise_failure,
        "look": calls.look,
        "hold": calls.hold,
        "release": calls.release,
        "offer": calls.offer,
        "write_ssh_entry": calls.write_ssh_entry,
    }
    arguments = dict(call.arguments)
    if "cluster" in arguments:
        arguments["cluster"] = msgspec.convert(arguments["cluster"], SkyPilotCluster)
    return methods[call.method](**arguments)


if __name__ == "__main__":
    sys.exit(main())

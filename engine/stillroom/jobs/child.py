"""Calls a function in a child process and waits for it, for work that needs heavy libraries.

The calling process need not load those libraries, and can end the work after a time limit. The
child reads the request from its standard input and writes the result to its standard output.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from pydantic import BaseModel

from stillroom.errors import EngineError, RunError
from stillroom.jobs.operations import ChildWork, load
from stillroom.processes import end_with_parent, kill_family, limit_this_process, memory_share
from stillroom.secrecy.environments import run_environment
from stillroom.settings import Workspace

_Result = TypeVar("_Result")
_POLL_S = 0.1
_KILLED_S = 5.0
_LAST_OUTPUT = 4096
_PER_PROCESSOR = 64 << 20
"""The memory that libraries take for each of their threads, one for each processor."""


class _ChildInput(msgspec.Struct):
    action: str
    parent: int
    workspace: str
    function: str
    request_type: str
    request: dict[str, Any]
    cpu_s: float
    memory_bytes: int
    secrets: dict[str, str] = {}


class _Failed(msgspec.Struct, tag="failed"):
    problem: str
    fix: str


class _Done(msgspec.Struct, tag="done"):
    result: msgspec.Raw


_PROGRESS = b"stillroom progress: "
"""What a line of the child's standard error begins with that is passed on while it works."""
_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def reports_to(listener: Callable[[str], None]) -> Generator[None]:
    """Has what children that the block starts report while they work passed to the listener."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(text: str) -> None:
    """Reports, in a child, how far it is, in one line; who called it may show the line."""
    line = _PROGRESS + " ".join(text.split()).encode(errors="replace") + b"\n"
    sys.stderr.buffer.write(line)
    sys.stderr.flush()


_STOP: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


@contextmanager
def stopped_by(event: threading.Event) -> Generator[None]:
    """Has children that the block starts, and threads with its context, killed at the event."""
    token = _STOP.set(event)
    try:
        yield
    finally:
        _STOP.reset(token)


def run_in_child(
    workspace: Workspace,
    work: ChildWork,
    request: BaseModel,
    *,
    result: type[_Result],
    secrets: Mapping[str, str] | None = None,
) -> _Result:
    """Calls the function of `work` in a child process and returns its result.

    All memory that the work took is free again afterwards. `secrets` are the keys, by name, that
    the child needs; it gets them through a pipe. Raises EngineError if the function raises one,
    and RunError if the child takes too long, takes too much memory, crashes, or is stopped
    (`stopped_by`).
    """
    kind = type(request)
    memory = memory_share() if work.memory_gb is None else int(work.memory_gb * 1e9)
    action = work.action.format_map(dict(request))
    child_input = _ChildInput(
        action=action,
        parent=os.getpid(),
        workspace=str(workspace.root),
        function=work.function,
        request_type=f"{kind.__module__}:{kind.__qualname__}",
        request=request.model_dump(mode="json"),
        # A bound for the case that no process is left to kill the child.
        cpu_s=work.timeout_s * (os.cpu_count() or 1),
        memory_bytes=memory + _PER_PROCESSOR * (os.cpu_count() or 1),
        secrets=dict(secrets or {}),
    )
    with tempfile.TemporaryFile() as printed:
        code, output = _finished(work, action, child_input, printed)
        if code:
            raise RunError(f"{action} failed: {_reason(code, printed)}", work.fix)
    answer = msgspec.json.decode(output, type=_Failed | _Done)
    if isinstance(answer, _Failed):
        raise EngineError(answer.problem, answer.fix or work.fix)
    return msgspec.json.decode(answer.result, type=result)


def _finished(
    work: ChildWork,
    action: str,
    child_input: _ChildInput,
    printed: IO[bytes],
) -> tuple[int, bytes]:
    """Returns the exit code and the answer of a child, which is killed if that takes too long."""
    stop, listener = _STOP.get(), _LISTENER.get()
    num_read = 0
    deadline = time.monotonic() + work.timeout_s
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stillroom.jobs.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=printed,
        env=run_environment(Path(child_input.workspace)),
        start_new_session=True,
    )
    rest: bytes | None = msgspec.json.encode(child_input)
    try:
        while True:
            try:
                output, _ = process.communicate(rest, timeout=_POLL_S)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                # The first call keeps the input, and a later one must not have any.
                rest = None
                if listener is not None:
                    num_read = _pass_on(printed, num_read, listener)
                if stop is not None and stop.is_set():
                    raise RunError(f"{action} was stopped", "call it again") from None
                if time.monotonic() > deadline:
                    raise RunError(f"{action} took over {work.timeout_s:g} s", work.fix) from None
    finally:
        if process.poll() is None:
            kill_family(process.pid)
            # A process that has left the family may still hold the pipe.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_KILLED_S)


def _pass_on(printed: IO[bytes], num_read: int, listener: Callable[[str], None]) -> int:
    """Passes on the progress that was printed after `num_read` bytes; returns the bytes read."""
    # The child writes at the offset that both share, so the parent reads without moving it.
    lines = os.pread(printed.fileno(), _LAST_OUTPUT, num_read)
    whole = lines[: lines.rfind(b"\n") + 1]
    for line in whole.splitlines():
        if line.startswith(_PROGRESS):
            listener(line.removeprefix(_PROGRESS).decode(errors="replace"))
    return num_read + (len(whole) or (len(lines) if len(lines) == _LAST_OUTPUT else 0))


def _reason(code: int, printed: IO[bytes]) -> str:
    if code == -signal.SIGXCPU:
        return "it used up its time"
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - _LAST_OUTPUT))
    written = printed.read().splitlines()
    kept = b"\n".join(line for line in written if not line.startswith(_PROGRESS))
    lines = kept.decode("utf-8", errors="replace").strip().splitlines()
    if lines:
        return lines[-1]
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}"


def main() -> None:
    """Carries out the request on standard input and writes its result to standard output."""
    child_input = msgspec.json.decode(sys.stdin.buffer.read(), type=_ChildInput)
    end_with_parent(child_input.parent)
    limit_this_process(cpu_s=child_input.cpu_s, memory_bytes=child_input.memory_bytes)
    # From here on, what libraries print goes to standard error and not into the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        workspace = Workspace(Path(child_input.workspace), child_input.secrets)
        request = load(child_input.request_type).model_validate(child_input.request)
        result = load(child_input.function)(workspace, request)
        answer = _Done(msgspec.Raw(msgspec.json.encode(result)))
    except EngineError as error:
        answer = _Failed(error.problem, error.fix)
    except MemoryError:
        most = f"{child_input.memory_bytes / 1e9:.1f} GB"
        answer = _Failed(f"{child_input.action} took more memory than the {most} it may take", "")
    with answers:
        answers.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()

"""Calls a function in a child process and waits for it, for work that needs heavy libraries.

The calling process does not load those libraries, and kills the child after a time limit. The
child reads the request from its standard input and writes the result to its standard output.
"""

import importlib
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
from stillroom.processes import (
    end_with_parent,
    kill_family,
    limit_this_process,
    user_code_memory_limit,
)
from stillroom.secrecy.environments import run_environment
from stillroom.settings import Workspace

_Result = TypeVar("_Result")
_POLL_S = 0.1
_LOADING_S = 300.0
"""The number of seconds in which a child must have loaded its libraries."""
_KILL_WAIT_S = 5.0
_TAIL_BYTES = 4096
_RESERVED_PER_PROCESSOR = 64 << 20
"""Address space in bytes that libraries reserve per thread; they start one thread per processor."""


class _ChildInput(msgspec.Struct):
    action: str
    parent_pid: int
    workspace: str
    function: str
    libraries: str | None
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
"""The prefix of the lines on the child's standard error that are progress reports."""
_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def report_progress_to(listener: Callable[[str], None]) -> Generator[None]:
    """Passes the progress reports of children that are started in the block to the listener."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(text: str) -> None:
    """Reports a child's progress to its parent, as one line of text."""
    line = _PROGRESS + " ".join(text.split()).encode(errors="replace") + b"\n"
    # A library may have printed an unfinished line.
    sys.stderr.buffer.write(b"\n" + line)
    sys.stderr.flush()


_STOP: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


@contextmanager
def kill_children_on(event: threading.Event) -> Generator[None]:
    """Kills the children that were started in the block once the event is set.

    Includes those of threads that run in a copy of the block's context.
    """
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

    `secrets` are the keys that the child needs, by name; they are passed through a pipe. Raises
    EngineError if the function raises one, and RunError if the child times out, exceeds its memory
    limit, crashes, or is killed by `kill_children_on`.
    """
    request_type = type(request)
    memory = user_code_memory_limit() if work.memory_gb is None else int(work.memory_gb * 1e9)
    action = work.action.format_map(dict(request))
    child_input = _ChildInput(
        action=action,
        parent_pid=os.getpid(),
        workspace=str(workspace.root),
        function=work.function,
        libraries=work.libraries,
        request_type=f"{request_type.__module__}:{request_type.__qualname__}",
        request=request.model_dump(mode="json"),
        # This limit still applies if no process is left to kill the child.
        cpu_s=work.timeout_s * (os.cpu_count() or 1),
        memory_bytes=memory + _RESERVED_PER_PROCESSOR * (os.cpu_count() or 1),
        secrets=dict(secrets or {}),
    )
    with tempfile.TemporaryFile() as stderr:
        code, output = _run_child(work, action, child_input, stderr)
        if code:
            raise RunError(f"{action} failed: {_failure_reason(code, stderr)}", work.fix)
    outcome = msgspec.json.decode(output, type=_Failed | _Done)
    if isinstance(outcome, _Failed):
        raise EngineError(outcome.problem, outcome.fix or work.fix)
    return msgspec.json.decode(outcome.result, type=result)


def _run_child(
    work: ChildWork,
    action: str,
    child_input: _ChildInput,
    stderr: IO[bytes],
) -> tuple[int, bytes]:
    """Runs a child, which is killed at its time limit; returns its exit code and its output."""
    stop, listener = _STOP.get(), _LISTENER.get()
    num_read, has_loaded = 0, work.libraries is None
    deadline = time.monotonic() + (work.timeout_s if has_loaded else _LOADING_S)

    def on_progress(text: str) -> None:
        nonlocal deadline, has_loaded
        if not has_loaded:
            has_loaded, deadline = True, time.monotonic() + work.timeout_s
        if listener is not None:
            listener(text)

    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stillroom.jobs.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=run_environment(Path(child_input.workspace)),
        start_new_session=True,
    )
    stdin: bytes | None = msgspec.json.encode(child_input)
    try:
        while True:
            try:
                output, _ = process.communicate(stdin, timeout=_POLL_S)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                # `communicate` keeps its input, which must not be passed again.
                stdin = None
                num_read = _forward_progress(stderr, num_read, on_progress)
                if stop is not None and stop.is_set():
                    raise RunError(f"{action} was stopped", "call it again") from None
                if time.monotonic() > deadline:
                    raise _timed_out(work, action, has_loaded=has_loaded) from None
    finally:
        if process.poll() is None:
            kill_family(process.pid)
            # A process that has left the family may still hold the pipe.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_KILL_WAIT_S)


def _timed_out(work: ChildWork, action: str, *, has_loaded: bool) -> RunError:
    """Returns the error of a child that was killed while it worked or loaded its libraries."""
    if has_loaded:
        return RunError(
            f"{action} timed out after {work.timeout_s:g} s",
            f"{work.fix}; or call it again if other programs keep this machine busy",
        )
    return RunError(
        f"{action} failed: loading the libraries for it took over {_LOADING_S:g} s",
        "call it again once this machine and its disk are less busy",
    )


def _forward_progress(stderr: IO[bytes], num_read: int, listener: Callable[[str], None]) -> int:
    """Forwards progress reports after byte `num_read`; returns the number of bytes read so far."""
    # The child writes at the offset that both share, so the parent reads without moving it.
    data = os.pread(stderr.fileno(), _TAIL_BYTES, num_read)
    lines = data[: data.rfind(b"\n") + 1]
    for line in lines.splitlines():
        if line.startswith(_PROGRESS):
            listener(line.removeprefix(_PROGRESS).decode(errors="replace"))
    return num_read + (len(lines) or (len(data) if len(data) == _TAIL_BYTES else 0))


def _failure_reason(code: int, stderr: IO[bytes]) -> str:
    """Returns why a child failed: the last line that it printed, its signal or its exit code."""
    if code == -signal.SIGXCPU:
        return "it exceeded its CPU time limit"
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - _TAIL_BYTES))
    tail = stderr.read().splitlines()
    messages = b"\n".join(line for line in tail if not line.startswith(_PROGRESS))
    lines = messages.decode("utf-8", errors="replace").strip().splitlines()
    if lines:
        return lines[-1]
    return f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"


def _import_libraries(module: str, action: str) -> None:
    """Imports the module of `ChildWork.libraries`; `action` is for error messages.

    Raises RunError if a library is installed but cannot be loaded.
    """
    try:
        # The function says which extra to install.
        with suppress(ModuleNotFoundError):
            importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise RunError(
            f"{action} failed: its libraries could not be loaded: {error}",
            "repair the installation of torch and transformers in the environment that runs "
            "stillroom; there, `python -c 'import torch, transformers'` shows the whole error",
        ) from error


def main() -> None:
    """Executes the request on standard input and writes its result to standard output."""
    child_input = msgspec.json.decode(sys.stdin.buffer.read(), type=_ChildInput)
    end_with_parent(child_input.parent_pid)
    # From here on, what libraries print goes to standard error and not into the result.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        workspace = Workspace(Path(child_input.workspace), child_input.secrets)
        request = load(child_input.request_type).model_validate(child_input.request)
        function = load(child_input.function)
        if child_input.libraries is not None:
            _import_libraries(child_input.libraries, child_input.action)
            # From here on, the parent counts the function's time.
            report_progress(child_input.action)
        limit_this_process(cpu_s=child_input.cpu_s, memory_bytes=child_input.memory_bytes)
        result = function(workspace, request)
        outcome = _Done(msgspec.Raw(msgspec.json.encode(result)))
    except EngineError as error:
        outcome = _Failed(error.problem, error.fix)
    except MemoryError:
        limit = f"{child_input.memory_bytes / 1e9:.1f} GB"
        outcome = _Failed(f"{child_input.action} exceeded its memory limit of {limit}", "")
    with stdout:
        stdout.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()

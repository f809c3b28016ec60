"""Runs programs for an export: llama.cpp's converter, or a server for the written files."""

import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from stillroom.errors import RunError
from stillroom.lines import last_line
from stillroom.processes import end_process
from stillroom.reporting import Reporter, stop_if_cancelled
from stillroom.secrecy.environments import bare_environment
from stillroom.teachers.tls import client_context

_STOP_S = 10.0


@contextmanager
def running_program(
    command: Sequence[str],
    *,
    log: Path,
    failure: Callable[[Sequence[str], Path, str], RunError],
    cwd: Path | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """Runs a program until the block ends, without the user's keys, and logs its output to `log`.

    If the program cannot be started, raises the error that `failure` builds from the command, the
    log and the outcome.
    """
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=cwd,
                env=bare_environment(),
            )
        except OSError as error:
            raise failure(command, log, f"could not be started: {error}") from error
        try:
            yield process
        finally:
            end_process(process, grace_s=_STOP_S)


_START_S = 900.0
_POLL_S = 0.2
_HOST = "127.0.0.1"


@contextmanager
def running_server(command: Sequence[str], *, log: Path, reporter: Reporter) -> Generator[str]:
    """Yields the address of an OpenAI-compatible server once it has loaded its model.

    Its output goes to `log`. Raises RunError if the server ends, or takes over 15 minutes to load.
    """
    port = _free_port()
    server_command = [*command, "--host", _HOST, "--port", str(port)]
    address = f"http://{_HOST}:{port}/v1"
    with running_program(server_command, log=log, failure=_failure) as process:
        _wait_until_loaded(process, f"{address}/models", server_command, log, reporter)
        yield address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _wait_until_loaded(
    process: subprocess.Popen[bytes],
    url: str,
    command: Sequence[str],
    log: Path,
    reporter: Reporter,
) -> None:
    deadline = time.monotonic() + _START_S
    # trust_env=False: the user's proxy must not be used for this machine.
    with httpx.Client(timeout=5.0, trust_env=False, verify=client_context()) as client:
        while time.monotonic() < deadline:
            stop_if_cancelled(reporter)
            if process.poll() is not None:
                end = last_line(log) or "no output"
                raise _failure(command, log, f"ended with code {process.returncode}: {end}")
            try:
                # llama.cpp answers 503 while it loads.
                if client.get(url).is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(_POLL_S)
    raise _failure(command, log, f"did not load the model within {_START_S / 60:g} minutes")


def _failure(command: Sequence[str], log: Path, outcome: str) -> RunError:
    return RunError(
        f"the server of the written files {outcome}, so the files could not be verified and were "
        "deleted",
        f"read the server's output in {log}; a newer version may support this model. To keep the "
        f"files, export without verify, then test them with `{shlex.join(command)}`",
    )

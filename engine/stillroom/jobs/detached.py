"""Starts processes that outlive their parent."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.places import open_real

_PIPE_BUFFER_BYTES = 4096
"""The bytes that a pipe buffers on every system before anything reads them."""


def start_detached(
    module: str,
    folder: Path,
    *,
    cwd: Path,
    log: Path,
    environment: Mapping[str, str],
    secrets: Mapping[str, str],
    inherited_fds: Sequence[int] = (),
) -> int:
    """Starts `python -m MODULE FOLDER` in a session of its own and returns its pid.

    The secrets are written to its standard input, so that they are in no file and no environment.
    inherited_fds: file descriptors that are inherited, with the locks that this process holds.
    """
    read_fd, write_fd = os.pipe()
    data = msgspec.json.encode(secrets)
    with os.fdopen(write_fd, "wb") as stream:
        if fits_in_pipe := len(data) <= _PIPE_BUFFER_BYTES:
            # The new process gets all secrets even if this one is killed right after the start.
            stream.write(data)
            stream.flush()
        try:
            process = _start(module, folder, cwd, log, environment, read_fd, inherited_fds)
        finally:
            os.close(read_fd)
        if not fits_in_pipe:
            # The process may have exited already; its state then records why.
            with suppress(BrokenPipeError):
                stream.write(data)
                stream.flush()
    # Without a thread that waits for it, the process would stay a zombie after it exits.
    threading.Thread(target=process.wait, daemon=True).start()
    return process.pid


def _start(
    module: str,
    folder: Path,
    cwd: Path,
    log: Path,
    environment: Mapping[str, str],
    stdin: int,
    inherited_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Starts the process, with `stdin` as its standard input and its output appended to `log`."""
    with os.fdopen(open_real(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
        return subprocess.Popen(
            # -P: modules in a user's folder must not shadow ours.
            [sys.executable, "-P", "-m", module, str(folder)],
            cwd=cwd,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=tuple(inherited_fds),
        )

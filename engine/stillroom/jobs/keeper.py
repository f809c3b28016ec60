"""The parent of a run's process: `python -m stillroom.jobs.keeper FOLDER`.

It forks the run's process, copies the output of the process and its children to log.txt, whose size
is bounded, and records how the process exited. Then it kills every process that the run has left
behind, including those in other process groups. It loads few modules, so that it stays small; the
run's libraries are loaded after the fork.
"""

import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import Any

from stillroom import bounds
from stillroom.places import open_real
from stillroom.processes import (
    RUN_MARK_VARIABLE,
    adopt_orphans,
    descendants,
    end_with_parent,
    kill,
    kill_marked,
)
from stillroom.secrecy.redaction import RedactedStream, Redactor

_WORKER = "stillroom.api.worker"
_BLOCK_BYTES = 1 << 16
_SAMPLE_EVERY_S = 2.0
_NUM_SAMPLES = 5
"""The number of samples kept: a large process may take seconds to exit after it was killed."""
_KILL_LIMIT_S = 8.0
_KILL_POLL_S = 0.02
_SIGNAL_EXIT_CODE = 128
"""Added to the number of a signal that ended the process, as shells do."""
_MAX_LOG_BYTES = bounds.LOG.limit


def main(arguments: Sequence[str]) -> int:
    """Starts the run's process, waits until it exits, and returns its exit code."""
    folder = Path(arguments[0])
    adopts_orphans = adopt_orphans()
    mark = token_hex(16)
    output, output_write = os.pipe()
    secrets_read, secrets_write = os.pipe()
    secrets = _read_secrets()
    keeper = os.getpid()
    # A signal that comes before the run's process can handle it must not end it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = os.fork()
    if worker == 0:
        os.close(output)
        os.close(secrets_write)
        os.dup2(secrets_read, 0)
        os.close(secrets_read)
        _become_worker(folder, mark, output_write, keeper)
    os.close(output_write)
    os.close(secrets_read)
    # The process may have exited already.
    with suppress(BrokenPipeError), os.fdopen(secrets_write, "wb") as stream:
        stream.write(secrets)
    redactor = Redactor(json.loads(secrets).values() if secrets else ())
    process = _RunProcess(worker, output, BoundedLog(folder / "log.txt"), redactor)
    code = process.wait()  # no limit: a run may take weeks
    # With 0 or 1, the process has written the run's final state itself.
    if code < 0 or code > 1:
        _write_process_end(folder, process, code)
    _kill_leftovers(process, mark, adopts_orphans=adopts_orphans)
    process.drain()
    return code if code >= 0 else _SIGNAL_EXIT_CODE - code


def _read_secrets() -> bytes:
    """Returns the secrets that the parent wrote to standard input; empty if that is a terminal."""
    return b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()


def _become_worker(folder: Path, mark: str, output: int, keeper: int) -> None:
    """Makes this forked process the run's process, which prints to the descriptor `output`.

    mark: a random value in the environment of all the run's processes. keeper: the parent's pid.
    """
    os.setsid()
    end_with_parent(keeper)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ[RUN_MARK_VARIABLE] = mark
    sys.argv = [_WORKER, str(folder)]
    runpy.run_module(_WORKER, run_name="__main__", alter_sys=True)
    sys.exit(0)


class BoundedLog:
    """Appends to a file of bounded size: when it grows too long, its middle is removed.

    Bytes that cannot be written are counted and dropped: a run must not fail because of its log.
    """

    def __init__(self, path: Path, *, max_bytes: int = _MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes, self._head_bytes, self._tail_bytes = (
            max_bytes,
            max_bytes // 8,
            3 * max_bytes // 8,
        )
        self._num_omitted = self._num_unwritten = 0
        self._stream = FileIO(open_real(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")
        self._size = path.stat().st_size
        self._note = b""

    def write(self, data: bytes) -> None:
        """Appends bytes."""
        if self._num_unwritten:
            data = _omission_note(self._num_unwritten, "the disk was full") + data
        try:
            written = self._stream.write(data)
        except OSError:
            self._num_unwritten += len(data)
            return
        self._num_unwritten = len(data) - written
        self._size += written
        if self._size > self._max_bytes:
            with suppress(OSError):
                self._shorten()

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def _shorten(self) -> None:
        """Replaces the middle of the file with a note on the omitted bytes."""
        with self._path.open("rb") as stream:
            head = stream.read(self._head_bytes)
            # An earlier note follows the same head; it is cut out too.
            stream.seek(-self._tail_bytes, 2)
            tail = stream.read()
        self._num_omitted += self._size - len(head) - len(self._note) - len(tail)
        note = _omission_note(self._num_omitted, "the log was too long")
        temporary = self._path.with_name(f".{self._path.name}.shorter")
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC
            stream = FileIO(open_real(temporary, flags), "a")
            unwritten = memoryview(head + note + tail)
            while unwritten:
                unwritten = unwritten[stream.write(unwritten) :]
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._stream.close()
        self._stream, self._note = stream, note
        self._size = len(head) + len(note) + len(tail)


class _RunProcess:
    """The run's process and its output pipe; secrets are removed from what it prints."""

    def __init__(self, worker: int, output: int, log: BoundedLog, redactor: Redactor) -> None:
        self._worker, self._output, self._log = worker, output, log
        self._redacted_log = RedactedStream(redactor, log.write)
        self._code: int | None = None
        self.memory_bytes = 0
        """The process's peak resident memory in bytes."""
        self._oom_samples = [(time.monotonic(), count_oom_kills())]
        """The times of the latest samples, each with the number of OOM kills until then."""
        self._is_printing = True

    def wait(self) -> int:
        """Copies the process's output to the log until it exits.

        Returns its exit code, or minus the number of the signal that ended it.
        """
        wakeups, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        os.set_blocking(wakeups, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _frame: self._forward_signal(number))
        self.reap()
        while self._code is None:
            sources = [self._output, wakeups] if self._is_printing else [wakeups]
            ready, _, _ = select.select(sources, [], [], _SAMPLE_EVERY_S)
            if self._output in ready:
                self._is_printing = self._copy_output()
            if wakeups in ready:
                with suppress(BlockingIOError):
                    os.read(wakeups, _BLOCK_BYTES)
            self._sample_oom_kills()
            self.reap()
        return self._code

    @property
    def has_run_out_of_memory(self) -> bool:
        """Whether the kernel's out-of-memory killer killed a process in the last seconds."""
        return count_oom_kills() > self._oom_samples[0][1]

    def drain(self) -> None:
        """Writes what is still in the pipe to the log, and closes the log."""
        while select.select([self._output], [], [], 0)[0] and self._copy_output():
            pass
        self._redacted_log.flush()
        self._log.close()

    def _forward_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self._worker, number)

    def _sample_oom_kills(self) -> None:
        now_s = time.monotonic()
        if now_s - self._oom_samples[-1][0] >= _SAMPLE_EVERY_S:
            self._oom_samples = [*self._oom_samples[-_NUM_SAMPLES:], (now_s, count_oom_kills())]

    def _copy_output(self) -> bool:
        """Copies available output to the log; returns False at the end of the output."""
        data = os.read(self._output, _BLOCK_BYTES)
        self._redacted_log.write(data)
        return bool(data)

    def reap(self) -> bool:
        """Reaps exited children, including adopted ones; returns whether any children are left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._worker:
                self._code = os.waitstatus_to_exitcode(status)
                # Linux counts in KB, macOS in bytes.
                unit_bytes = 1 if sys.platform == "darwin" else 1024
                self.memory_bytes = usage.ru_maxrss * unit_bytes


def _write_process_end(folder: Path, process: _RunProcess, code: int) -> None:
    """Writes to ended.json how the process exited, if it wrote no final state itself."""
    end: dict[str, Any] = {
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "memory_bytes": process.memory_bytes,
        "out_of_memory": code == -signal.SIGKILL and process.has_run_out_of_memory,
    }
    # On a full disk, the run's outcome is determined without this file.
    with suppress(OSError):
        temporary = folder / ".ended.json"
        handle = open_real(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(end) + "\n")
        temporary.replace(folder / "ended.json")


def _kill_leftovers(process: _RunProcess, mark: str, *, adopts_orphans: bool) -> None:
    """Kills the processes that the run has left behind, for at most 8 seconds."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    if not adopts_orphans:
        kill_marked({mark}, variable=RUN_MARK_VARIABLE)
    # `descendants` imports a library, so it is called only while there are children.
    while process.reap() and time.monotonic() < deadline:
        for child in descendants(os.getpid()):
            kill(child)
        # A killed process that prints must not wait for room in the pipe.
        time.sleep(_KILL_POLL_S)


def count_oom_kills() -> int:
    """Returns how many processes the kernel's out-of-memory (OOM) killer has killed; 0 if unknown.

    Counts those in this process's control group, or else those on the whole machine.
    """
    for file, name in _oom_counters():
        with suppress(OSError, ValueError):
            for line in file.read_text(encoding="ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    return 0


def _oom_counters() -> list[tuple[Path, str]]:
    """Returns the files that count OOM kills, each with its counter's name, best first."""
    groups: list[tuple[Path, str]] = []
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups.append((root / path.lstrip("/") / "memory.events", "oom_kill"))
            elif "memory" in controllers.split(","):
                file = root / "memory" / path.lstrip("/") / "memory.oom_control"
                groups.append((file, "oom_kill"))
    return [*groups, (Path("/proc/vmstat"), "oom_kill")]


def _omission_note(num_bytes: int, reason: str) -> bytes:
    return f"\n[{num_bytes} bytes omitted: {reason}]\n".encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

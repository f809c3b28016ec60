"""The log of one of the processes that train together, without the run's secrets."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from stillroom.secrecy.redaction import RedactedStream, Redactor

_CHUNK = 1 << 16


def write_output_to(log: Path, redactor: Redactor) -> None:
    """Sends stdout and stderr, also those of C libraries, to a log without the known secrets.

    A process of its own does the writing, so that the last words of a process that is killed get
    there too. It ends when nothing holds the two streams any more.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.close(writing)
            _copy(reading, output, redactor)
        finally:
            os._exit(0)  # this process must never train
    os.close(reading)
    os.close(output)
    os.dup2(writing, sys.stdout.fileno())
    os.dup2(writing, sys.stderr.fileno())
    os.close(writing)


def _copy(reading: int, output: int, redactor: Redactor) -> None:
    # Whoever ends the training ends its process, and this one has the rest to write.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        os.close(stream.fileno())
    clean = RedactedStream(redactor, lambda data: _write_all(output, data))
    while data := os.read(reading, _CHUNK):
        clean.write(data)
    clean.flush()


def _write_all(output: int, data: bytes) -> None:
    rest = memoryview(data)
    # What a full disk refuses is lost: a training must not end because of its log.
    with suppress(OSError):
        while rest:
            rest = rest[os.write(output, rest) :]

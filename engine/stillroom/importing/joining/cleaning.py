"""Brings messages into our shape without secrets, for large logs in a second process.

The second process reads messages from the spill while the first one goes on reading the sources,
so that two processors work at once. It is only faster: what it does not do, the first one does.
"""

import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Self

import msgspec

from stillroom.importing.joining.messages import plain_message, shaped_message
from stillroom.importing.joining.spill import Spill
from stillroom.importing.redaction import Redaction
from stillroom.secrecy.environments import run_environment
from stillroom.secrecy.redaction import Redactor
from stillroom.settings import Workspace

_LONGEST_READ = 16 << 20


def clean_piece(raw: bytes, redaction: Redaction | None) -> bytes:
    """Returns a message as JSON in our shape; with a redaction, without secrets."""
    plain = plain_message(raw)
    if plain is not None:
        if redaction is not None:
            redaction.clean(plain)
        return msgspec.json.encode(plain)
    message: dict[str, Any] = shaped_message(raw)
    return msgspec.json.encode(message if redaction is None else redaction.message(message))


class _Job(msgspec.Struct):
    spill: int
    output: int
    keep_secrets: bool
    keep_personal: bool
    own: list[str]


class CleaningProcess:
    """A second process that cleans messages; messages with marks are left to the first one."""

    def __init__(self, workspace: Workspace, spill: Spill, redaction: Redaction) -> None:
        self._environment = run_environment(workspace.root)
        self._spill, self._redaction, self._output = spill, redaction, Spill(spill.folder)
        self._num_given = 0
        self._places, self._sizes = array("Q"), array("I")

    def __enter__(self) -> Self:
        self._output.__enter__()
        handles = (self._spill.handle, self._output.handle)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=handles,
            env=self._environment,
        )
        job = _Job(*handles, *self._redaction.settings)
        self._send(msgspec.json.encode(job) + b"\n")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._close_input()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()
        self._output.__exit__(None, None, None)

    def give(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """Gives the process all messages that it has not been given, of those in the spill."""
        first, self._num_given = self._num_given, len(places)
        count = self._num_given - first
        self._spill.flush()
        new_places, new_sizes = array("Q", places[first:]), array("I", sizes[first:])
        self._send(array("I", [count]).tobytes() + new_places.tobytes() + new_sizes.tobytes())

    def _send(self, data: bytes) -> None:
        stream = self._process.stdin
        if stream is not None and not stream.closed:
            # A process that has ended reports that by its missing result.
            with suppress(BrokenPipeError):
                stream.write(data)
                stream.flush()

    def _close_input(self) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.stdin = None

    def finish(self) -> None:
        """Waits until all messages that were given are done. Without a result none of them is."""
        self._close_input()
        done, _ = self._process.communicate()
        sizes = array("I")
        if self._process.returncode == 0 and len(done) == sizes.itemsize * self._num_given:
            sizes.frombytes(done)
            self._places = array("Q", accumulate(sizes, initial=0))
            self._sizes = sizes
            self._output.grown_to(self._places[-1])

    def piece(self, number: int) -> bytes | None:
        """Returns a message as JSON in our shape; None if the process has not cleaned it."""
        size = self._sizes[number] if number < len(self._sizes) else 0
        return self._output.read(self._places[number], size) if size else None


def main() -> None:
    """Cleans the messages that standard input names, and writes their lengths at its end."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
    redaction = Redaction(
        Redactor(job.own), keep_secrets=job.keep_secrets, keep_personal=job.keep_personal
    )
    done = array("I")
    with os.fdopen(job.output, "wb", buffering=1 << 20, closefd=False) as output:
        while head := sys.stdin.buffer.read(done.itemsize):
            [count] = array("I", head)
            places, sizes = array("Q"), array("I")
            places.frombytes(sys.stdin.buffer.read(count * places.itemsize))
            sizes.frombytes(sys.stdin.buffer.read(count * sizes.itemsize))
            for raw in _pieces(job.spill, places, sizes):
                piece = clean_piece(raw, redaction)
                # A mark's number depends on the conversation, which is not known here.
                done.append(0 if redaction.has_marked else len(piece))
                if not redaction.has_marked:
                    output.write(piece)
                redaction.begin_conversation()
    sys.stdout.buffer.write(done.tobytes())


def _pieces(handle: int, places: Sequence[int], sizes: Sequence[int]) -> Sequence[bytes]:
    """Returns the pieces of a file, which are mostly beside one another."""
    if not places:
        return []
    first, end = places[0], places[-1] + sizes[-1]
    if end - first > _LONGEST_READ:
        pairs = zip(places, sizes, strict=True)
        return [os.pread(handle, size, place) for place, size in pairs]
    data = os.pread(handle, end - first, first)
    return [data[place - first : place - first + size]
            for place, size in zip(places, sizes, strict=True)]  # fmt: skip


if __name__ == "__main__":
    main()

"""Reads messages and takes secrets out of them, for large logs in a second process.

The second process reads the new messages from the spill, and says of each what joining has to know,
while the first one goes on reading the sources, so that two processors work at once. It is only
faster: what it does not do, the first one does.
"""

import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, BinaryIO, Self

import msgspec

from stillroom.importing.joining.messages import (
    PlainMessage,
    plain_message,
    seen_message,
    shaped_message,
)
from stillroom.importing.joining.recent import REMEMBERED, RecentNumbers
from stillroom.importing.joining.seen_batch import BatchMaker, SeenBatch
from stillroom.importing.joining.spill import Spill
from stillroom.importing.json_rows import UnreadableRowError
from stillroom.importing.redaction import Redaction
from stillroom.secrecy.environments import run_environment
from stillroom.secrecy.redaction import Redactor
from stillroom.settings import Workspace

_END_S = 5.0
_LONGEST_READ = 16 << 20
_LENGTH = struct.Struct("I")


def clean_piece(raw: bytes, redaction: Redaction | None) -> bytes:
    """Returns a message as JSON in our shape; with a redaction, without secrets."""
    return _cleaned(raw, plain_message(raw), redaction)


def _cleaned(raw: bytes, plain: PlainMessage | None, redaction: Redaction | None) -> bytes:
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


class _Done(msgspec.Struct, array_like=True):
    seen: SeenBatch
    sizes: bytes
    """The lengths of the messages without secrets, in four bytes each; 0 if that is not known."""


_DONE = msgspec.msgpack.Decoder(_Done)


class MessageProcess:
    """A second process that reads messages; it leaves those with marks for the first to clean."""

    def __init__(self, workspace: Workspace, spill: Spill, redaction: Redaction) -> None:
        self._environment = run_environment(workspace.root)
        self._spill, self._redaction, self._output = spill, redaction, Spill(spill.folder)
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
        self._process.wait(_END_S)
        self._output.__exit__(None, None, None)

    def give(self, places: "array[int]", sizes: "array[int]") -> None:
        """Gives the process messages of the spill to read. Each time `receive` is called once."""
        self._spill.flush()
        self._send(_LENGTH.pack(len(places)) + places.tobytes() + sizes.tobytes())

    def receive(self, first: int) -> SeenBatch | None:
        """Returns what is known of the messages given last, of which the first has this number.

        Returns None if the process has failed.
        """
        stream = self._process.stdout
        head = b"" if stream is None else stream.read(_LENGTH.size)
        if stream is None or len(head) < _LENGTH.size:
            return None
        [length] = _LENGTH.unpack(head)
        data = stream.read(length)
        if len(data) < length:
            return None
        done = _DONE.decode(data)
        self._sizes.frombytes(bytes((first - len(self._sizes)) * self._sizes.itemsize))
        self._sizes.frombytes(done.sizes)
        return done.seen

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
        """Waits until the process has ended. If it has failed, it has cleaned nothing."""
        self._close_input()
        if self._process.wait() != 0:  # no limit: it has as much to read as the import
            self._sizes = array("I")
        self._places = array("Q", accumulate(self._sizes, initial=0))
        self._output.grown_to(self._places[-1])

    def pieces(self, numbers: Sequence[int]) -> list[bytes | None]:
        """Returns messages as JSON in our shape; None for those not cleaned there."""
        places, sizes, known = self._places, self._sizes, len(self._sizes)
        spans = [(places[n], sizes[n]) if n < known else (0, 0) for n in numbers]
        return [piece or None for piece in self._output.read_all(spans)]


def main() -> None:
    """Reads the messages that standard input names, and says what is known of each batch."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
    redaction = Redaction(
        Redactor(job.own), keep_secrets=job.keep_secrets, keep_personal=job.keep_personal
    )
    encoder, lengths = msgspec.msgpack.Encoder(), RecentNumbers(REMEMBERED)
    with os.fdopen(job.output, "wb", buffering=1 << 20, closefd=False) as output:
        while head := sys.stdin.buffer.read(_LENGTH.size):
            [count] = _LENGTH.unpack(head)
            places, sizes = array("Q"), array("I")
            places.frombytes(sys.stdin.buffer.read(count * places.itemsize))
            sizes.frombytes(sys.stdin.buffer.read(count * sizes.itemsize))
            data = encoder.encode(
                _done(_pieces(job.spill, places, sizes), redaction, output, lengths)
            )
            sys.stdout.buffer.write(_LENGTH.pack(len(data)) + data)
            sys.stdout.buffer.flush()


def _done(
    raws: Sequence[bytes], redaction: Redaction, output: BinaryIO, lengths: RecentNumbers
) -> _Done:
    """Writes messages without secrets, and returns what is known of them.

    `lengths` has those of the replies that were read, by their digests. The shorter of two forms of
    a reply is mostly what a history repeats of it, which no rollout needs.
    """
    maker, sizes = BatchMaker(), array("I")
    for raw in raws:
        plain = plain_message(raw)
        try:
            seen = seen_message(raw, plain)
        except UnreadableRowError as error:
            maker.add_unreadable(error)
            sizes.append(0)
            continue
        maker.add(seen)
        if seen.role == "assistant":
            digest, length = hash(seen.digest), len(raw)
            if (lengths.get(digest) or 0) > length:
                sizes.append(0)
                continue
            lengths[digest] = length
        piece = _cleaned(raw, plain, redaction)
        # A mark's number depends on the conversation, which is not known here.
        sizes.append(0 if redaction.has_marked else len(piece))
        if redaction.has_marked:
            redaction.begin_conversation()
        else:
            output.write(piece)
    return _Done(maker.batch(), sizes.tobytes())


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

"""Messages over a pair of byte streams: a JSON header line with the length, then the message.

The agent on a machine and the local code exchange them. Output of the shell's start files before
the first message is skipped; a stream that ends without an end frame counts as broken.
"""

import zlib
from collections.abc import Mapping
from typing import IO, Annotated, Any, Literal, TypeVar

import msgspec

from stillroom import bounds
from stillroom.errors import EngineError
from stillroom.remote.host import AccessDeniedError, MachineGoneError

MARK = b"--stillroom-frames-1--\n"
"""Written before the first message, since a machine may print a greeting."""
_MAX_GREETING_BYTES = bounds.GREETING.limit
_MAX_HEADER_BYTES = bounds.FRAME_HEADER.limit
_MAX_MESSAGE_BYTES = bounds.FRAME.limit

_Message = TypeVar("_Message")
_ErrorKind = Literal["gone", "denied"]
_FrameType = Literal["message", "error", "end"]


class BrokenStreamError(Exception):
    """The stream ended early or had invalid data; the client has to reconnect."""

    def __init__(self, reason: str, *, output: str = "") -> None:
        super().__init__(reason)
        self.output = output
        """The output received instead of messages, e.g. of a machine that rejects the login."""


_READ_ADVICE = "read the machine's advice, the last line above"


def quote_remote_fix(problem: str, fix: str) -> tuple[str, str]:
    """Returns the problem and the fix to show for an error that another machine sent.

    The machine's own fix is not trusted, since an agent might follow it. So it is quoted as a part
    of the problem.
    """
    return f"{problem}\nthe machine's advice: {fix}", _READ_ADVICE


class RemoteError(msgspec.Struct, frozen=True, kw_only=True):
    """An error sent by the agent."""

    problem: Annotated[str, msgspec.Meta(max_length=20_000)]
    fix: Annotated[str, msgspec.Meta(max_length=20_000)]
    kind: _ErrorKind | None = None
    """Its class in `_ERRORS`; None for EngineError."""


_ERRORS: Mapping[_ErrorKind, type[EngineError]] = {
    "gone": MachineGoneError,
    "denied": AccessDeniedError,
}


class _Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    length: Annotated[int, msgspec.Meta(ge=0, le=_MAX_MESSAGE_BYTES)]
    frame_type: _FrameType = msgspec.field(name="holds", default="message")
    is_compressed: bool = msgspec.field(name="is_packed", default=False)
    """Whether the message is compressed, in one zlib stream with the earlier compressed ones."""


class Frames:
    """Sends and receives messages (anything that msgspec can encode) over two byte streams."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._compressor, self._decompressor = zlib.compressobj(), zlib.decompressobj()

    def begin(self) -> None:
        """Writes the mark after which messages follow."""
        self._write(MARK)

    def skip_greeting(self) -> bytes:
        """Skips the output before the first message and returns it.

        Raises BrokenStreamError if no message follows.
        """
        greeting = bytearray()
        while not greeting.endswith(MARK):
            byte = self._read(1)
            if not byte or len(greeting) > _MAX_GREETING_BYTES:
                raise BrokenStreamError(_describe(bytes(greeting)), output=_text(bytes(greeting)))
            greeting += byte
        return bytes(greeting[: -len(MARK)])

    def send(self, message: object, *, is_compressed: bool = False) -> None:
        """Sends one message; `is_compressed` compresses it in one stream with earlier ones."""
        body = msgspec.msgpack.encode(message)
        if is_compressed:
            body = self._compressor.compress(body) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._send(body, "message", is_compressed=is_compressed)

    def send_error(self, error: EngineError) -> None:
        """Sends an error, which `receive` raises on the other side."""
        kind: _ErrorKind | None = None
        for name, error_type in _ERRORS.items():
            if isinstance(error, error_type):
                kind = name
        remote_error = RemoteError(problem=error.problem, fix=error.fix, kind=kind)
        self._send(msgspec.msgpack.encode(remote_error), "error")

    def end(self) -> None:
        """Sends the end frame: no message follows, and there was no error."""
        self._send(b"", "end")

    def receive(self, kind: type[_Message] | Any) -> _Message | None:
        """Returns the next message, or None after the end frame.

        Raises EngineError for an error that the other side sent, and BrokenStreamError if the
        stream ended early or is invalid.
        """
        line = self._read_line()
        try:
            header = msgspec.json.decode(line, type=_Header)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BrokenStreamError(f"{_describe(line)} ({error})") from error
        body = self._read(header.length)
        if len(body) < header.length:
            raise BrokenStreamError("the stream ended inside a message")
        if header.is_compressed:
            body = self._decompress(body)
        if header.frame_type == "end":
            return None
        return self._decode(body, kind, header)

    def _decompress(self, body: bytes) -> bytes:
        """Decompresses the body of a message."""
        try:
            data = self._decompressor.decompress(body, _MAX_MESSAGE_BYTES)
        except zlib.error as error:
            raise BrokenStreamError(f"a message cannot be decompressed: {error}") from error
        if self._decompressor.unconsumed_tail:
            raise BrokenStreamError(f"a message exceeds {_MAX_MESSAGE_BYTES} bytes")
        return data

    def _decode(self, body: bytes, kind: type[_Message] | Any, header: _Header) -> _Message:
        """Returns a frame's message, or raises its error."""
        try:
            if header.frame_type == "message":
                return msgspec.msgpack.decode(body, type=kind)
            error = msgspec.msgpack.decode(body, type=RemoteError)
        # ValueError: invalid UTF-8; RecursionError: nested deeper than any valid message.
        except (msgspec.MsgspecError, ValueError, RecursionError) as broken:
            raise BrokenStreamError(f"unexpected message: {broken}") from broken
        error_type = EngineError if error.kind is None else _ERRORS[error.kind]
        raise error_type(*quote_remote_fix(error.problem, error.fix))

    def _read_line(self) -> bytes:
        """Reads a header line."""
        try:
            line = self._source.readline(_MAX_HEADER_BYTES)
        except (OSError, ValueError) as error:
            raise BrokenStreamError(str(error)) from error
        if not line.endswith(b"\n"):
            raise BrokenStreamError(_describe(line) if line else "the stream ended")
        return line

    def _read(self, size: int) -> bytes:
        """Reads `size` bytes; fewer at the end of the stream."""
        try:
            return self._source.read(size)
        # ValueError: the stream was closed.
        except (OSError, ValueError) as error:
            raise BrokenStreamError(str(error)) from error

    def _send(self, body: bytes, frame_type: _FrameType, *, is_compressed: bool = False) -> None:
        header = _Header(length=len(body), frame_type=frame_type, is_compressed=is_compressed)
        self._write(msgspec.json.encode(header) + b"\n" + body)

    def _write(self, data: bytes) -> None:
        """Writes and flushes bytes."""
        try:
            self._sink.write(data)
            self._sink.flush()
        except (OSError, ValueError) as error:
            raise BrokenStreamError(str(error)) from error


def _describe(data: bytes) -> str:
    """Returns a text for error messages that quotes the end of the received data."""
    return f"unexpected output {_text(data)!r}" if _text(data) else "no output received"


def _text(data: bytes) -> str:
    return data[-400:].decode("utf-8", errors="replace").strip()

"""Atomic writes, append-only logs, hashes and locks of files."""

import fcntl
import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from stillroom import bounds
from stillroom.errors import DataError
from stillroom.places import add_path_to_errors, open_real, real_folder

_BLOCK = 1 << 20
Buffer = bytes | memoryview | msgspec.Raw
_MAX_WAITING = 2
_SYNC_INTERVAL_BYTES = 64 << 20
_MAX_DOCUMENT_BYTES = bounds.DOCUMENT.limit
_LONGEST_REASON = 300
_DAMAGED_FIX = "if another program wrote it, move it elsewhere; otherwise create it again"

_Document = TypeVar("_Document")


def canonical_json(value: Any) -> bytes:
    """Returns a value as compact JSON with sorted keys, so that equal values have equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def content_hash(value: Any) -> str:
    """Returns the first 16 hex digits of the SHA-256 of the value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:16]


def file_sha256(path: Path, *, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Returns the SHA-256 of a file's bytes in hex, read in constant memory.

    It reads 2 MB at a time, so that a hashing thread rarely waits for the GIL. If `is_stopped`
    returns True, it returns early with the hash of the part read so far.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2 * _BLOCK))
    with path.open("rb", buffering=0) as stream:
        while not is_stopped() and (size := stream.readinto(buffer)):
            digest.update(buffer[:size])
    return digest.hexdigest()


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces a file's content: readers see the old bytes or the new ones, never a mixture.

    With `durable`, the call returns once the bytes are on the disk. Turn it off for files that are
    soon overwritten.
    """
    with replacing(path) as handle, os.fdopen(handle, "wb") as stream:
        stream.write(data)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())


def partial_name(name: str, ending: str) -> str:
    """Returns the temporary name of a file that is being written."""
    return f".{name}.partial-{ending}"


@contextmanager
def replacing(path: Path) -> Generator[int]:
    """Yields the descriptor of a new file, which replaces `path` if the block raises no error.

    The caller closes the descriptor. Raises InputError if the path contains a link.
    """
    # A random name, so that two calls that write the same output do not share a temporary file.
    temporary = partial_name(path.name, secrets.token_hex(4))
    with add_path_to_errors(path), real_folder(path.parent) as folder:
        try:
            yield folder.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            folder.rename(temporary, path.name)
        except BaseException:
            folder.remove(temporary)
            raise


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file atomically.

    Raises FileExistsError if the file exists, e.g. because another process has just written it.
    """
    temporary = path.with_name(partial_name(path.name, secrets.token_hex(4)))
    write_atomic(temporary, data)
    with add_path_to_errors(path), real_folder(path.parent) as folder:
        try:
            # A rename would replace an existing file; creating a hard link fails instead.
            folder.link(temporary.name, path.name)
        finally:
            folder.remove(temporary.name)


def wait_for_disk(path: Path) -> None:
    """Waits until the content of a file, or the file list of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Writes a value as indented JSON, atomically."""
    document = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    write_atomic(path, document, durable=durable)


def read_json(path: Path, kind: type[_Document], *, fix: str = _DAMAGED_FIX) -> _Document:
    """Returns a JSON document that Stillroom wrote, at most 64 MB.

    Raises DataError if it is damaged, and OSError if it cannot be opened.
    """
    with path.open("rb") as stream:
        # A read of the maximum would allocate as much, which fails in a run that is out of memory.
        num_bytes = os.fstat(stream.fileno()).st_size
        data = stream.read(min(num_bytes, _MAX_DOCUMENT_BYTES) + 1)
    try:
        if len(data) > _MAX_DOCUMENT_BYTES:
            raise ValueError(f"it is longer than {_MAX_DOCUMENT_BYTES >> 20} MB")
        return msgspec.json.decode(data, type=kind)
    # ValueError: malformed JSON, fields of other types, or bytes that are not UTF-8.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {str(error)[:_LONGEST_REASON]}", fix) from error


@contextmanager
def atomic_output(path: Path) -> Generator["LineWriter"]:
    """Yields a writer whose lines appear at `path` only if the block raises no error."""
    with (
        replacing(path) as handle,
        FileIO(handle, "w") as stream,
        LineWriter(stream) as writer,
    ):
        yield writer
        writer.flush()
        os.fsync(stream.fileno())


class LineWriter:
    """Writes JSONL rows to an open binary stream in blocks, and counts and hashes them."""

    def __init__(self, stream: FileIO) -> None:
        self._stream = stream
        self._parts: list[Buffer] = []
        self._source: bytes | None = None
        self._num_buffered = 0
        self._digest = _BackgroundSha256()
        self._sync, self._num_synced = _BackgroundSync(stream.fileno()), 0
        self.num_rows = self.num_bytes = 0

    def write(self, row: Any) -> None:
        """Encodes one row and writes it as a line."""
        self.write_raw(msgspec.json.encode(row))

    def write_raw(self, *parts: Buffer, source: bytes | None = None) -> None:
        """Writes the parts of one encoded row (without a newline) as a line.

        `source` is the buffer that the parts are views of. It stays in memory until they are
        written, so its size counts towards a full block.
        """
        self._parts += parts
        self._parts.append(b"\n")
        self.num_rows += 1
        if source is None:
            self._num_buffered += sum(map(len, parts)) + 1
        elif source is not self._source:
            self._source = source
            self._num_buffered += len(source)
        if self._num_buffered >= _BLOCK:
            self.flush()

    def append_file(self, path: Path, *, num_rows: int) -> None:
        """Writes all lines of another JSONL file, which has `num_rows` rows."""
        with path.open("rb", buffering=0) as stream:
            while block := stream.read(4 * _BLOCK):
                self._parts.append(block)
                self.flush()
        self.num_rows += num_rows

    def flush(self) -> None:
        """Writes all buffered lines to the operating system."""
        if not self._parts:
            return
        block = b"".join(self._parts)
        self._parts.clear()
        self._source, self._num_buffered = None, 0
        self.num_bytes += len(block)
        unwritten = memoryview(block)
        while unwritten:
            unwritten = unwritten[self._stream.write(unwritten) :]
        self._digest.update(block)
        if self.num_bytes - self._num_synced >= _SYNC_INTERVAL_BYTES:
            self._sync.start()
            self._num_synced = self.num_bytes

    @property
    def sha256(self) -> str:
        """The SHA-256 of the flushed bytes, in hex."""
        return self._digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._digest.close()
        self._sync.close()


class _BackgroundSync:
    """Syncs a file to the disk in a thread while it is written, so that the last sync is short."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self._pending is None or self._pending.done()

    def start(self) -> None:
        """Starts a sync unless one is running. Raises the error of the last sync."""
        if self.is_idle:
            self._raise_error()
            self._pending = self._thread.submit(os.fsync, self._handle)

    def close(self) -> None:
        """Waits until the last sync is done. Raises its error if it failed."""
        self._thread.shutdown()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._pending is not None:
            self._pending.result()


class _BackgroundSha256:
    """Hashes blocks in a thread, with a limit on the number of waiting blocks."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def update(self, block: bytes) -> None:
        if len(self._waiting) == _MAX_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._digest.update, block))

    def hexdigest(self) -> str:
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()

    def close(self) -> None:
        self._thread.shutdown()


class AppendLog:
    """An append-only JSONL file; an incomplete last line is removed when it is reopened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        cut_torn_line(path)
        self._stream = os.fdopen(open_real(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        self._is_synced = True
        self._sync = _BackgroundSync(self._stream.fileno())

    def append(self, row: Any, *, durable: bool = False) -> None:
        """Writes a row to the operating system; with `durable`, also waits for the disk."""
        self._is_synced = False
        with add_path_to_errors(self.path):
            self._stream.write(msgspec.json.encode(row) + b"\n")
            self._stream.flush()
            if durable:
                os.fsync(self._stream.fileno())
                self._is_synced = True

    def sync_soon(self) -> None:
        """Starts a sync in a thread unless one is running. Raises the error of the last sync."""
        if self._sync.is_idle:
            self._is_synced = True
            self._sync.start()

    def remove(self) -> None:
        """Deletes the file. Nothing may be appended after this call."""
        self.path.unlink()
        self._is_synced = True

    def close(self) -> None:
        """Syncs the file to the disk and closes it; it is closed even if the sync fails."""
        try:
            self._stream.flush()
            if not self._is_synced:
                os.fsync(self._stream.fileno())
        finally:
            try:
                self._sync.close()
            finally:
                self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut_torn_line(path: Path) -> int:
    """Removes the bytes after the last newline of a file, and returns their number."""
    if not path.exists():
        return 0
    with os.fdopen(open_real(path, os.O_RDWR), "r+b") as stream:
        end = stream.seek(0, os.SEEK_END)
        complete = _last_newline_end(stream, end)
        if complete < end:
            stream.truncate(complete)
        return end - complete


def _last_newline_end(stream: Any, end: int) -> int:
    """Returns the position after the last newline before `end`; 0 if there is none."""
    block = 1 << 16
    position = end
    while position > 0:
        start = max(0, position - block)
        stream.seek(start)
        index = stream.read(position - start).rfind(b"\n")
        if index >= 0:
            return start + index + 1
        position = start
    return 0


class FileLock:
    """An exclusive lock of this process, which the kernel releases when the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def try_acquire(self) -> bool:
        """Acquires the lock if it is free; returns whether this process holds it now."""
        if self._handle is not None:
            return True
        handle = open_real(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    def acquire_within(
        self, timeout_s: float, *, poll_s: float = 0.1, sleep: Callable[[float], None] = time.sleep
    ) -> bool:
        """Waits up to `timeout_s` for the lock; returns whether this process holds it now."""
        deadline = time.monotonic() + timeout_s
        while not (is_held := self.try_acquire()) and time.monotonic() < deadline:
            sleep(poll_s)
        return is_held

    @property
    def handle(self) -> int:
        """The descriptor of a held lock; a child that inherits it also holds the lock."""
        if self._handle is None:
            raise ValueError(f"{self.path} is not held")
        return self._handle

    def release(self) -> None:
        """Releases the lock if this process holds it, unless a child has inherited it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

"""Copies one file from another machine, from where an earlier try broke off, and verifies it."""

import os
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

from stillroom.files import file_sha256
from stillroom.places import open_real
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.records import RemoteFile

_TRIES = 3

Fetch = Callable[[str, int], Generator[bytes]]
"""Yields the bytes of a file there, by its path, from an offset on."""


def fetch_file(
    file: RemoteFile, staged: Path, fetch: Fetch, on_bytes: Callable[[int], None]
) -> None:
    """Leaves a file's verified content at `staged`, where an earlier try may have left a part.

    Raises UnreachableError if the connection breaks, and MachineError if the content has another
    hash than the machine says, three times.
    """
    for _ in range(_TRIES):
        _copy(file, staged, fetch, on_bytes)
        if staged.stat().st_size == file.num_bytes and file_sha256(staged) == file.sha256:
            return
        staged.unlink()
    raise MachineError(
        f"{file.path} has another content than its machine says, {_TRIES} times",
        "look at the memory and the disk of that machine; it is tried again",
    )


def _copy(file: RemoteFile, staged: Path, fetch: Fetch, on_bytes: Callable[[int], None]) -> None:
    handle = open_real(staged, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(handle, "wb") as stream:
        offset = stream.seek(0, os.SEEK_END)
        if offset > file.num_bytes:
            stream.truncate(0)
            offset = stream.seek(0)
        if offset < file.num_bytes:
            with closing(fetch(file.path, offset)) as blocks:
                for block in blocks:
                    stream.write(block)
                    on_bytes(len(block))
        stream.flush()
        os.fsync(stream.fileno())
    if staged.stat().st_size < file.num_bytes:
        raise UnreachableError(f"{file.path} came only in part", "the rest is asked for again")

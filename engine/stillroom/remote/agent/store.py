"""The contents that were sent to a machine: one file for each, named by its SHA-256.

A content that is being sent grows in `.HASH.partial`, which the next connection goes on with. It
gets its name only when its hash has been verified. Two senders may write the same content at once:
both write the same bytes to the same places, so neither has to wait for the other.
"""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.files import file_sha256, partial_name, wait_for_disk
from stillroom.places import naming
from stillroom.remote.agent.folders import AgentFolder
from stillroom.remote.agent.room import make_room, note_use
from stillroom.remote.frames import BrokenStreamError

_NEVER_EDITED = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth", ".zst", ".parquet"})
"""Files that programs write once; others (a tool's database, say) are edited in place."""
_LEAST_LINKED_BYTES = 1 << 20


class WantedContent(msgspec.Struct, frozen=True, kw_only=True):
    """A content that `have` is asked about."""

    sha256: str
    num_bytes: int


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a content, and the size of the whole."""

    sha256: str
    num_bytes: int
    offset: int
    data: bytes


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to each content's last piece: whether the whole has the right hash."""

    sha256: str
    is_stored: bool


def tell_missing(there: AgentFolder) -> None:
    """The command `have`: answers a list of contents with the missing ones and their bytes.

    Makes room for these where it can.
    """
    wanted = there.receive(list[WantedContent]) or []
    missing = {w.sha256: _num_here(there, w) for w in wanted if not _is_stored(there, w)}
    if wanted and there.store.is_dir():
        for content in wanted:
            note_use(stored(there, content.sha256))
        lacking = sum(w.num_bytes - missing[w.sha256] for w in wanted if w.sha256 in missing)
        keep = {name for w in wanted for name in (w.sha256, _partial(there, w.sha256).name)}
        make_room(there.store, lacking, keep=keep, now_s=time.time())
    there.frames.send(missing)


def take_contents(there: AgentFolder) -> None:
    """The command `put`: writes contents piece by piece, and answers each one's last piece."""
    _make_private(there.root)
    _make_private(there.store)
    while (piece := there.receive(Piece)) is not None:
        wanted = WantedContent(sha256=piece.sha256, num_bytes=piece.num_bytes)
        if not _is_stored(there, wanted):
            _write(_partial(there, piece.sha256), piece)
        if piece.offset + len(piece.data) >= piece.num_bytes:
            is_stored = _finish(there, wanted)
            there.frames.send(Stored(sha256=piece.sha256, is_stored=is_stored))


def stored(there: AgentFolder, sha256: str) -> Path:
    """Returns where a content lies, or would lie."""
    return there.store / sha256


def place_file(
    there: AgentFolder, sha256: str, target: Path, *, is_executable: bool = False
) -> None:
    """Puts a content at a path of a run, which must not exist.

    A model's weights are given a second name; what a program may edit in place is copied.
    """
    source = stored(there, sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    is_large = source.stat().st_size >= _LEAST_LINKED_BYTES
    if is_large and target.suffix in _NEVER_EDITED and not is_executable:
        with suppress(OSError):  # Another file system, or one without second names.
            os.link(source, target)
            return
    with naming(target):
        shutil.copyfile(source, target)
    target.chmod(0o700 if is_executable else 0o600)


def keep_file(there: AgentFolder, path: Path, sha256: str) -> None:
    """Gives a finished file of a run a second name in the store, for runs that will read it."""
    _make_private(there.store)
    if path.suffix in _NEVER_EDITED and not stored(there, sha256).exists():
        with suppress(OSError):  # It is only a saving.
            os.link(path, stored(there, sha256))


def _make_private(folder: Path) -> None:
    """Makes a folder that other users of the machine cannot look into."""
    with naming(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _is_stored(there: AgentFolder, wanted: WantedContent) -> bool:
    try:
        return stored(there, wanted.sha256).stat().st_size == wanted.num_bytes
    except FileNotFoundError:
        return False


def _partial(there: AgentFolder, sha256: str) -> Path:
    return there.store / partial_name(sha256, "sent")


def _num_here(there: AgentFolder, wanted: WantedContent) -> int:
    """Returns how many bytes of a content are here; 0 if there are more than there can be."""
    try:
        size = _partial(there, wanted.sha256).stat().st_size
    except FileNotFoundError:
        return 0
    return size if size <= wanted.num_bytes else 0


def _write(partial: Path, piece: Piece) -> None:
    with naming(partial):
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(handle).st_size
            if size < piece.offset:
                # A hole would be filled by nobody. It was deleted meanwhile.
                raise BrokenStreamError(f"{partial} has become shorter")
            if piece.offset == 0 and size > piece.num_bytes:
                os.ftruncate(handle, 0)
            written = 0
            while written < len(piece.data):
                rest = memoryview(piece.data)[written:]
                written += os.pwrite(handle, rest, piece.offset + written)
        finally:
            os.close(handle)


def _finish(there: AgentFolder, wanted: WantedContent) -> bool:
    """Gives a whole content its name if it has the right hash; deletes it otherwise."""
    partial = _partial(there, wanted.sha256)
    with naming(partial), suppress(FileNotFoundError):  # Another sender was first.
        is_right = partial.stat().st_size == wanted.num_bytes
        if is_right and file_sha256(partial) == wanted.sha256:
            wait_for_disk(partial)
            partial.replace(stored(there, wanted.sha256))
        else:
            partial.unlink()
    return _is_stored(there, wanted)

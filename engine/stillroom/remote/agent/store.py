"""The contents that were sent to this machine: one file for each, named by its SHA-256.

A content that is being sent grows in `.HASH.partial-sent`, where the next connection resumes. It
gets its name only when its hash has been verified. Two senders may write the same content at once:
both write the same bytes to the same places, so neither has to wait for the other.

Contents that no run uses any more are deleted: old ones, and more where the disk has no room.
Each of them also exists where it came from; it is sent again when it is needed.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stillroom.files import file_sha256, partial_name, wait_for_disk
from stillroom.places import naming
from stillroom.remote.frames import BrokenStreamError
from stillroom.remote.records import Piece, PieceStored

_NEVER_EDITED = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth", ".zst", ".parquet"})
"""Files that programs write once; others (a tool's database, say) are edited in place."""
_LEAST_LINKED_BYTES = 1 << 20
_KEPT_S = 14 * 86400.0
_SURELY_KEPT_S = 86400.0
"""Between sending and starting; contents that a run uses have a second name, and are kept too."""
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class AgentFolder:
    """The one folder on this machine that holds all of Stillroom's files."""

    root: Path

    @property
    def store(self) -> Path:
        """The folder with the contents, each in a file that is named by its SHA-256."""
        return self.root / "store"

    @property
    def runs(self) -> Path:
        """The folder with one folder for each run."""
        return self.root / "runs"


def have(agent: AgentFolder, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The command `have`: of contents, given by hash and size, yields the missing ones.

    Each comes with the bytes of it that are stored already. Makes room for the rest where it can.
    """
    missing = {
        sha256: _num_sent(agent, sha256, num_bytes)
        for sha256, num_bytes in sizes.items()
        if not _is_stored(agent, sha256, num_bytes)
    }
    if sizes and agent.store.is_dir():
        for sha256 in sizes:
            note_use(content_file(agent, sha256))
        lacking = sum(sizes[sha256] - num_sent for sha256, num_sent in missing.items())
        keep = {name for sha256 in sizes for name in (sha256, _partial(agent, sha256).name)}
        make_room(agent.store, lacking, keep=keep, now_s=time.time())
    yield missing


def put(agent: AgentFolder, piece: Piece) -> Iterator[PieceStored]:
    """The command `put`: writes a piece of a content, and answers the content's last piece."""
    _make_private(agent.root)
    _make_private(agent.store)
    if not _is_stored(agent, piece.sha256, piece.num_bytes):
        _write(_partial(agent, piece.sha256), piece)
    if piece.offset + len(piece.data) >= piece.num_bytes:
        is_stored = _finish(agent, piece.sha256, piece.num_bytes)
        yield PieceStored(sha256=piece.sha256, is_stored=is_stored)


def content_file(agent: AgentFolder, sha256: str) -> Path:
    """Returns the path of a content, which may not be stored."""
    return agent.store / sha256


def place_file(
    agent: AgentFolder, sha256: str, target: Path, *, is_executable: bool = False
) -> None:
    """Puts a content at a path of a run, which must not exist.

    A model's weights are given a second name; what a program may edit in place is copied.
    """
    source = content_file(agent, sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    is_large = source.stat().st_size >= _LEAST_LINKED_BYTES
    if is_large and target.suffix in _NEVER_EDITED and not is_executable:
        with suppress(OSError):  # Another file system, or one without second names.
            os.link(source, target)
            return
    with naming(target):
        shutil.copyfile(source, target)
    target.chmod(0o700 if is_executable else 0o600)


def keep_file(agent: AgentFolder, path: Path, sha256: str) -> None:
    """Gives a finished file of a run a second name in the store, for runs that will read it."""
    _make_private(agent.store)
    if path.suffix in _NEVER_EDITED and not content_file(agent, sha256).exists():
        with suppress(OSError):  # It is only a saving.
            os.link(path, content_file(agent, sha256))


def note_use(path: Path) -> None:
    """Notes that a content is needed: its change of status is the time of its last use.

    Its time of change stays, by which runs that share the file recognise it.
    """
    with suppress(FileNotFoundError):
        path.chmod(path.stat().st_mode & 0o777)


def make_room(store: Path, num_bytes: int, *, keep: Collection[str], now_s: float) -> list[str]:
    """Deletes contents so that `num_bytes` fit, and those that were not used for two weeks.

    keep: names that stay in any case. Returns the names of what was deleted.
    """
    free = shutil.disk_usage(store).free - _SPARE_BYTES
    deleted: list[str] = []
    for last_used, size, name in _unused(store, keep):
        age_s = now_s - last_used
        if age_s < _SURELY_KEPT_S or (age_s < _KEPT_S and free >= num_bytes):
            break
        with suppress(FileNotFoundError):
            (store / name).unlink()
            free += size
            deleted.append(name)
    return deleted


def _unused(store: Path, keep: Collection[str]) -> list[tuple[float, int, str]]:
    """Returns the files that only the store has, the longest unused first."""
    found: list[tuple[float, int, str]] = []
    for path in store.iterdir():
        with suppress(FileNotFoundError):
            state = path.lstat()
            if path.name not in keep and state.st_nlink == 1:
                found.append((state.st_ctime, state.st_size, path.name))
    return sorted(found)


def _make_private(folder: Path) -> None:
    """Makes a folder that other users of the machine cannot look into."""
    with naming(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _is_stored(agent: AgentFolder, sha256: str, num_bytes: int) -> bool:
    return _size(content_file(agent, sha256)) == num_bytes


def _partial(agent: AgentFolder, sha256: str) -> Path:
    return agent.store / partial_name(sha256, "sent")


def _num_sent(agent: AgentFolder, sha256: str, num_bytes: int) -> int:
    """Returns how many bytes of a content were sent before; 0 if too many were."""
    size = _size(_partial(agent, sha256)) or 0
    return size if size <= num_bytes else 0


def _write(partial: Path, piece: Piece) -> None:
    with naming(partial):
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb", buffering=0) as stream:
            size = os.fstat(handle).st_size
            if size < piece.offset:
                # The partial file was deleted since; writing here would leave a gap that stays.
                raise BrokenStreamError(f"{partial} has become shorter")
            if piece.offset == 0 and size > piece.num_bytes:
                stream.truncate(0)
            rest = memoryview(piece.data)
            stream.seek(piece.offset)
            while rest:
                rest = rest[stream.write(rest) :]


def _finish(agent: AgentFolder, sha256: str, num_bytes: int) -> bool:
    """Gives a whole content its name if it has the right hash; deletes it otherwise."""
    partial = _partial(agent, sha256)
    with naming(partial), suppress(FileNotFoundError):  # Another sender was first.
        if partial.stat().st_size == num_bytes and file_sha256(partial) == sha256:
            wait_for_disk(partial)
            partial.replace(content_file(agent, sha256))
        else:
            partial.unlink()
    return _is_stored(agent, sha256, num_bytes)

"""The finished files of a run: whole checkpoints as they are written, at its end all the rest."""

import hashlib
import os
import stat
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.errors import DataError
from stillroom.files import read_json, write_json
from stillroom.models.resolve import CHECKPOINTS
from stillroom.remote.agent.agent_run import AgentRun, StartRecord
from stillroom.remote.records import Heartbeat, RemoteFile, RemoteFiles
from stillroom.remote.run_files import is_of_run_folder, is_output, is_temporary

_BLOCK = 4 << 20
_PULSE_S = 2.0
_DOCUMENTS = frozenset({".json", ".yml", ".yaml", ".md", ".py"})
"""What is written whole, by a rename, so that it may be brought back while the run goes on."""


class _Hashed(msgspec.Struct, frozen=True):
    """A file as it was when it was hashed."""

    stamp: tuple[int, int, int]
    """Its inode, its size and its time of change."""
    sha256: str


class FinishedFiles:
    """Lists a run's finished files with their hashes, each hashed once."""

    def __init__(self, place: AgentRun, started: StartRecord) -> None:
        self._place, self._started = place, started
        self._file = place.base / "hashes.json"
        self._saved_at = time.monotonic()
        self._hashes: dict[str, _Hashed] = {}
        with suppress(FileNotFoundError, DataError):
            self._hashes = read_json(self._file, dict[str, _Hashed])
        self._last: dict[str, tuple[int, int, int]] | None = None

    def news(self, *, is_last: bool) -> Generator[RemoteFiles | Heartbeat, None, list[RemoteFile]]:
        """Yields all finished files if there are other ones than before, and returns them.

        A large file takes a while to hash, during which pulses are yielded.
        """
        stamps = dict(self._stamps(is_last=is_last))
        if stamps == self._last and not is_last:
            return []
        files: list[RemoteFile] = []
        for path, stamp in stamps.items():
            sha256 = yield from self._hash_of(path, stamp)
            files.append(RemoteFile(path=path, sha256=sha256, num_bytes=stamp[1]))
        self._save()
        # What has gone or changed meanwhile is looked at again; at the end nothing does.
        if not is_last and dict(self._stamps(is_last=is_last)) != stamps:
            return []
        self._last = stamps
        if not is_last:
            files = [file for file in files if not self._is_as_sent(file)]
        else:
            files = [file for file in files if not self._is_sent_input(file)]
        yield RemoteFiles(files=files, is_last=is_last)
        return files

    def _stamps(self, *, is_last: bool) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Yields the finished files, relative to the workspace, as they are now."""
        workspace = self._place.workspace
        for path in self._candidates(is_last=is_last):
            # A checkpoint may be pruned right now.
            with suppress(FileNotFoundError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    name = path.relative_to(workspace).as_posix()
                    yield name, (about.st_ino, about.st_size, about.st_mtime_ns)

    def _candidates(self, *, is_last: bool) -> Iterator[Path]:
        folder = self._place.folder.path
        if is_last:
            yield from self._all()
            return
        for checkpoint in sorted(folder.glob(f"{CHECKPOINTS}/[!.]*")):
            yield from _files_in(checkpoint)
        for path in sorted(folder.glob("[!.]*")):
            if path.suffix in _DOCUMENTS and self._comes(path):
                yield path
        for output in self._started.outputs:
            path = self._place.workspace / output
            for document in sorted(path.with_name(f".{path.name}").glob("[!.]*")):
                if document.suffix in _DOCUMENTS:
                    yield document

    def _all(self) -> Iterator[Path]:
        for path in _files_in(self._place.folder.path):
            if self._comes(path):
                yield path
        found: set[Path] = set()
        for output in self._started.outputs:
            parent = (self._place.workspace / output).parent
            for path in _files_in(parent) if parent.is_dir() else ():
                name = path.relative_to(self._place.workspace).as_posix()
                is_run = name.startswith(f"runs/{self._place.run_id}/")
                if is_output(name, self._started.outputs) and not is_run:
                    found.add(path)
        yield from sorted(found)

    def _comes(self, path: Path) -> bool:
        name = path.relative_to(self._place.workspace).as_posix()
        return is_of_run_folder(name, self._place.run_id)

    def _is_sent_input(self, file: RemoteFile) -> bool:
        """Returns whether a file only looks like an output: it was sent, and is as it was."""
        in_run = file.path.startswith(f"runs/{self._place.run_id}/")
        return not in_run and self._is_as_sent(file)

    def _is_as_sent(self, file: RemoteFile) -> bool:
        return self._started.placed.get(file.path) == file.sha256

    def _save(self) -> None:
        """Keeps the hashes for the next connection, which without them makes them anew."""
        with suppress(OSError):
            write_json(self._file, self._hashes, durable=False)
        self._saved_at = time.monotonic()

    def _hash_of(self, path: str, stamp: tuple[int, int, int]) -> Generator[Heartbeat, None, str]:
        known = self._hashes.get(path)
        if known is not None and known.stamp == stamp:
            return known.sha256
        digest, told_at = hashlib.sha256(), time.monotonic()
        with suppress(FileNotFoundError), (self._place.workspace / path).open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                if time.monotonic() - told_at > _PULSE_S:
                    told_at = time.monotonic()
                    yield Heartbeat()
        self._hashes[path] = _Hashed(stamp, digest.hexdigest())
        if time.monotonic() - self._saved_at > _PULSE_S:
            self._save()
        return digest.hexdigest()


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and those below, in order, without what is being written."""
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_temporary(name))
        for name in sorted(names):
            if not is_temporary(name):
                yield Path(above, name)

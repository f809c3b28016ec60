"""The files that a run on this machine writes: growing ones and finished ones.

The log, events, journals and output rows grow; their new lines are sent as they are appended. All
other files are finished when they appear: each checkpoint when it is complete, and the rest at the
run's end. They are listed with their hashes, and fetched by path.
"""

import os
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from threading import Event

from stillroom.errors import DataError, EngineError
from stillroom.files import read_json, write_json
from stillroom.models.hash_cache import HashCache
from stillroom.models.resolve import CHECKPOINTS
from stillroom.remote.agent.runs import AgentRun, StartRecord, agent_run
from stillroom.remote.agent.store import AgentFolder
from stillroom.remote.records import AppendedLines, FetchRequest, RemoteFile, RemoteFiles
from stillroom.remote.run_files import is_downloaded_run_file, is_output, is_safe, is_temporary

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 256 << 20
_LOG_LINE_BYTES = 1 << 16
"""A log line of this size is sent before it ends: progress bars print no newline for hours."""
_REPORT_EVERY_S = 1.0
_DOCUMENT_SUFFIXES = frozenset({".json", ".yml", ".yaml", ".md", ".py"})
"""Suffixes of files that are written atomically, so that they can be sent during the run."""


def fetch(agent: AgentFolder, request: FetchRequest) -> Generator[bytes]:
    """The command `fetch`: yields the bytes of a finished file, and then an empty message.

    Raises EngineError if the run has no file of that name.
    """
    path = agent_run(agent, request.run_id).workspace / request.path
    if not is_safe(request.path) or path.is_symlink() or not path.is_file():
        raise EngineError(
            f"the run's file {request.path!r} no longer exists",
            "no action needed: files that the run writes later are downloaded",
        )
    with path.open("rb", buffering=0) as stream:
        stream.seek(request.offset)
        while data := stream.read(_BLOCK_BYTES):
            yield data
    yield b""


class AppendedFiles:
    """Yields the lines appended to a run's growing files since the last call."""

    def __init__(self, run: AgentRun, seen: Mapping[str, int], outputs: Sequence[str]) -> None:
        self._run, self._outputs = run, outputs
        self._offsets = dict(seen)
        self._file = run.base / "seen.json"
        self._inodes: dict[str, int] = {}
        """The inode of each file when it was last sent, which seen.json records."""
        with suppress(FileNotFoundError, DataError):
            self._inodes = read_json(self._file, dict[str, dict[str, int]]).get("inodes", {})

    def updates(self, *, is_last: bool) -> Iterator[AppendedLines]:
        """Yields the complete new lines of all files.

        With `is_last`, also yields an unfinished last line of log.txt.
        """
        for path in sorted(self._paths()):
            # The run may replace or delete the file at any moment.
            with suppress(FileNotFoundError):
                yield from self._updates_of(path, is_last=is_last and path.endswith("/log.txt"))

    def _paths(self) -> set[str]:
        """Returns the paths of the growing files, relative to the workspace."""
        workspace, folder = self._run.workspace, self._run.folder.path
        files = [folder / "log.txt", *folder.glob("*.jsonl")]
        for output in self._outputs:
            files += _growing_files_of(workspace / output)
        return {
            path.relative_to(workspace).as_posix()
            for path in files
            if path.is_file() and not path.is_symlink() and not is_temporary(path.name)
        }

    def _updates_of(self, path: str, *, is_last: bool) -> Iterator[AppendedLines]:
        """Yields the new lines of a file; all its lines if it was truncated or replaced."""
        with (self._run.workspace / path).open("rb", buffering=0) as stream:
            inode = os.fstat(stream.fileno()).st_ino
            size = stream.seek(0, 2)
            offset = self._offsets.get(path, 0)
            # Without a recorded inode, the file counts as the same unless it is too short.
            is_new = self._inodes.get(path, inode if offset <= size else 0) != inode
            if offset > size or is_new:
                # The log was truncated because it was too long, or a file was replaced.
                offset = 0
                yield AppendedLines(path=path, offset=0, data=b"")
            self._record_inode(path, inode)
            while data := _read_lines(stream, offset, path, is_last=is_last):
                yield AppendedLines(path=path, offset=offset, data=data)
                offset += len(data)
                self._offsets[path] = offset
            self._offsets[path] = offset

    def _record_inode(self, path: str, inode: int) -> None:
        """Records the inode before bytes are sent, so that later connections recognise the file."""
        if self._inodes.get(path) != inode:
            self._inodes[path] = inode
            # If the disk is full, the log lines that say so must still be sent.
            with suppress(OSError):
                write_json(self._file, {"inodes": self._inodes}, durable=False)


def _growing_files_of(output: Path) -> list[Path]:
    """Returns an output's growing files, which are sent early so that no paid call is lost."""
    journal = output.with_name(f".{output.name}")
    scores = output.with_name(f".{output.name}.scores")
    rollouts = [output, journal / "journal.jsonl"] if (journal / "settings.json").exists() else []
    return [*rollouts, scores]


def _read_lines(stream: FileIO, offset: int, path: str, *, is_last: bool) -> bytes:
    """Returns complete lines from an offset on, about 1 MB at most; empty if there are none."""
    size = _BLOCK_BYTES
    while True:
        stream.seek(offset)
        data = stream.read(size)
        end = data.rfind(b"\n") + 1
        if end:
            return data[:end]
        is_log = path.endswith("/log.txt")
        if is_log and (is_last or len(data) >= _LOG_LINE_BYTES):
            return data
        if len(data) < size or size >= _MAX_LINE_BYTES:
            return b""
        size *= 4


class FinishedFiles:
    """Lists a run's finished files with their hashes, each hashed once."""

    def __init__(self, run: AgentRun, start: StartRecord) -> None:
        self._run, self._start = run, start
        self._hashes = HashCache(run.base / "hashes.json", settled_after_s=0.0)
        self._last_stamps: dict[Path, tuple[int, int, int]] | None = None

    def updates(
        self, *, is_last: bool
    ) -> Generator[RemoteFiles | None, None, Sequence[RemoteFile]]:
        """Yields and returns the finished files if they have changed since the last call.

        Returns an empty list otherwise. Yields None every second while a file is being hashed.
        """
        stamps = self._stamps(is_last=is_last)
        if stamps == self._last_stamps and not is_last:
            return []
        try:
            files = yield from self._hash_files(stamps)
        finally:
            self._hashes.save()
        # Files that changed while they were hashed are listed again by the next call; once the
        # run has ended, none change.
        if not is_last and self._stamps(is_last=is_last) != stamps:
            return []
        self._last_stamps = stamps
        files = [file for file in files if not self._is_unchanged_input(file, is_last=is_last)]
        yield RemoteFiles(files=files, is_last=is_last)
        return files

    def _hash_files(
        self, stamps: Mapping[Path, tuple[int, int, int]]
    ) -> Generator[None, None, list[RemoteFile]]:
        """Returns the files with their hashes; yields None every second during the hashing."""
        files, is_stopped = list[RemoteFile](), Event()
        with ThreadPoolExecutor(1) as pool, ExitStack() as at_end:
            at_end.callback(is_stopped.set)
            for path, (_, num_bytes, _) in stamps.items():
                hashing = pool.submit(self._hashes.hash_of, path, is_stopped.is_set)
                while not wait([hashing], _REPORT_EVERY_S).done:
                    yield None
                with suppress(FileNotFoundError):  # A checkpoint was pruned.
                    sha256 = hashing.result()
                    file = RemoteFile(path=self._relative(path), sha256=sha256, num_bytes=num_bytes)
                    files.append(file)
        return files

    def _stamps(self, *, is_last: bool) -> dict[Path, tuple[int, int, int]]:
        """Returns the finished files with their current inode, size and modification time."""
        stamps: dict[Path, tuple[int, int, int]] = {}
        for path in self._all_files() if is_last else self._finished_files():
            # A checkpoint may be pruned concurrently.
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    stamps[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return stamps

    def _finished_files(self) -> Iterator[Path]:
        """Yields the files that are already finished while the run is in progress."""
        folder = self._run.folder.path
        for checkpoint in sorted(folder.glob(f"{CHECKPOINTS}/[!.]*")):
            yield from _files_in(checkpoint)
        for path in sorted(folder.glob("[!.]*")):
            if path.suffix in _DOCUMENT_SUFFIXES and self._is_run_file(path):
                yield path
        for output in self._start.outputs:
            path = self._run.workspace / output
            for document in sorted(path.with_name(f".{path.name}").glob("[!.]*")):
                if document.suffix in _DOCUMENT_SUFFIXES:
                    yield document

    def _all_files(self) -> Iterator[Path]:
        """Yields all files of an ended run: those of its folder and its outputs."""
        yield from filter(self._is_run_file, _files_in(self._run.folder.path))
        outputs = self._start.outputs
        parents = {(self._run.workspace / output).parent for output in outputs}
        candidates = {path for parent in parents for path in _files_in(parent)}
        for path in sorted(candidates):
            relative = self._relative(path)
            if is_output(relative, outputs) and not self._is_in_run_folder(relative):
                yield path

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._run.workspace).as_posix()

    def _is_run_file(self, path: Path) -> bool:
        return is_downloaded_run_file(self._relative(path), self._run.run_id)

    def _is_in_run_folder(self, path: str) -> bool:
        return path.startswith(f"runs/{self._run.run_id}/")

    def _is_unchanged_input(self, file: RemoteFile, *, is_last: bool) -> bool:
        """Returns whether a file is an unchanged input rather than an output."""
        is_unchanged = self._start.placed.get(file.path) == file.sha256
        return is_unchanged and not (is_last and self._is_in_run_folder(file.path))


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder in sorted order, without temporary ones."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_temporary(name))
        for name in sorted(names):
            if not is_temporary(name):
                yield Path(parent, name)

"""The files that a run on this machine makes: those it appends to, and those that are finished.

Its log and events, its journals and the rows of its outputs are appended to; what is new of them is
sent line by line. Everything else is finished once it is there: whole checkpoints as they are
written, at the run's end all the rest. These are listed with their hashes, and fetched by path.
"""

import os
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from threading import Event

import msgspec

from stillroom.errors import DataError, EngineError
from stillroom.files import read_json, write_json
from stillroom.models.resolve import CHECKPOINTS
from stillroom.remote.agent.runs import AgentRun, StartRecord, agent_run
from stillroom.remote.agent.store import AgentFolder
from stillroom.remote.hash_cache import HashCache
from stillroom.remote.records import AppendedLines, FetchRequest, RemoteFile, RemoteFiles
from stillroom.remote.run_files import is_of_run_folder, is_output, is_safe, is_temporary

_BLOCK = 1 << 20
_LONGEST_LINE = 256 << 20
_LOG_LINE = 1 << 16
"""A log may hold progress bars, which end no line for hours."""
_TICK_S = 1.0
_DOCUMENTS = frozenset({".json", ".yml", ".yaml", ".md", ".py"})
"""What is written whole, by a rename, so that it may be downloaded while the run continues."""


def fetch(agent: AgentFolder, request: FetchRequest) -> Generator[bytes]:
    """The command `fetch`: yields the bytes of a finished file, and then an empty message.

    Raises EngineError if the run has no file of that name.
    """
    path = agent_run(agent, request.run_id).workspace / request.path
    if not is_safe(request.path) or path.is_symlink() or not path.is_file():
        raise EngineError(
            f"the run has no file {request.path!r} any more",
            "no action needed: files that it writes later are downloaded",
        )
    with path.open("rb", buffering=0) as stream:
        stream.seek(request.offset)
        while data := stream.read(_BLOCK):
            yield data
    yield b""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The content of seen.json: which file each path was when it was last sent."""

    inodes: dict[str, int] = {}


class AppendedFiles:
    """Yields what has been appended to files since they were last looked at."""

    def __init__(self, run: AgentRun, seen: Mapping[str, int], outputs: Sequence[str]) -> None:
        self._run, self._outputs = run, outputs
        self._offsets = dict(seen)
        self._file = run.base / "seen.json"
        self._inodes: dict[str, int] = {}
        with suppress(FileNotFoundError, DataError):
            self._inodes = dict(read_json(self._file, _Seen).inodes)

    def updates(self, *, is_last: bool) -> Iterator[AppendedLines]:
        """Yields the complete new lines of all files.

        With `is_last`, it also yields an unfinished last line of log.txt.
        """
        for path in sorted(self._paths()):
            # The run may replace or delete the file at any moment.
            with suppress(FileNotFoundError):
                yield from self._updates_of(path, is_last=is_last and path.endswith("/log.txt"))

    def _paths(self) -> set[str]:
        """Returns the files that are appended to, relative to the workspace."""
        workspace, folder = self._run.workspace, self._run.folder.path
        found = [folder / "log.txt", *folder.glob("*.jsonl")]
        for output in self._outputs:
            found += _appended(workspace / output)
        return {
            path.relative_to(workspace).as_posix()
            for path in found
            if path.is_file() and not path.is_symlink() and not is_temporary(path.name)
        }

    def _updates_of(self, path: str, *, is_last: bool) -> Iterator[AppendedLines]:
        with (self._run.workspace / path).open("rb", buffering=0) as stream:
            inode = os.fstat(stream.fileno()).st_ino
            size = stream.seek(0, 2)
            offset = self._offsets.get(path, 0)
            is_new = self._inodes.get(path, inode if offset <= size else 0) != inode
            if offset > size or is_new:
                # The log was truncated because it was too long, or a file was replaced.
                offset = 0
                yield AppendedLines(path=path, offset=0, data=b"")
            self._remember(path, inode)
            while data := _lines(stream, offset, path, is_last=is_last):
                yield AppendedLines(path=path, offset=offset, data=data)
                offset += len(data)
                self._offsets[path] = offset
            self._offsets[path] = offset

    def _remember(self, path: str, inode: int) -> None:
        """Notes the file before its bytes are sent, so that a later connection recognises it."""
        if self._inodes.get(path) != inode:
            self._inodes[path] = inode
            # A full disk must not keep anybody from hearing about it.
            with suppress(OSError):
                write_json(self._file, _Seen(inodes=self._inodes), durable=False)


def _appended(output: Path) -> list[Path]:
    """Returns the files that a run appends to for an output, so that no paid call is lost."""
    journal = output.with_name(f".{output.name}")
    scores = output.with_name(f".{output.name}.scores")
    rollouts = [output, journal / "journal.jsonl"] if (journal / "settings.json").exists() else []
    return [*rollouts, scores]


def _lines(stream: FileIO, offset: int, path: str, *, is_last: bool) -> bytes:
    size = _BLOCK
    while True:
        stream.seek(offset)
        data = stream.read(size)
        end = data.rfind(b"\n") + 1
        if end:
            return data[:end]
        is_log = path.endswith("/log.txt")
        if is_log and (is_last or len(data) >= _LOG_LINE):
            return data
        if len(data) < size or size >= _LONGEST_LINE:
            return b""
        size *= 4


class FinishedFiles:
    """Lists a run's finished files with their hashes, each hashed once."""

    def __init__(self, run: AgentRun, started: StartRecord) -> None:
        self._run, self._started = run, started
        self._hashes = HashCache(run.base / "hashes.json", settled_after_s=0.0)
        self._last: dict[Path, tuple[int, int, int]] | None = None

    def updates(
        self, *, is_last: bool
    ) -> Generator[RemoteFiles | None, None, Sequence[RemoteFile]]:
        """Yields all finished files if they have changed since the last call, and returns them.

        A large file takes a while to hash; None is yielded every second of it.
        """
        stamps = self._stamps(is_last=is_last)
        if stamps == self._last and not is_last:
            return []
        try:
            files = yield from self._hashed(stamps)
        finally:
            self._hashes.save()
        # Files that changed while they were hashed are listed again by the next call; once the
        # run has ended, none change.
        if not is_last and self._stamps(is_last=is_last) != stamps:
            return []
        self._last = stamps
        files = [file for file in files if not self._is_only_sent(file, is_last=is_last)]
        yield RemoteFiles(files=files, is_last=is_last)
        return files

    def _hashed(
        self, stamps: Mapping[Path, tuple[int, int, int]]
    ) -> Generator[None, None, list[RemoteFile]]:
        files, is_stopped = list[RemoteFile](), Event()
        with ThreadPoolExecutor(1) as pool, ExitStack() as at_end:
            at_end.callback(is_stopped.set)
            for path, (_, num_bytes, _) in stamps.items():
                hashing = pool.submit(self._hashes.hash_of, path, is_stopped.is_set)
                while not wait([hashing], _TICK_S).done:
                    yield None
                with suppress(FileNotFoundError):  # A checkpoint was pruned.
                    sha256 = hashing.result()
                    file = RemoteFile(path=self._name(path), sha256=sha256, num_bytes=num_bytes)
                    files.append(file)
        return files

    def _stamps(self, *, is_last: bool) -> dict[Path, tuple[int, int, int]]:
        """Returns the finished files as they are now: their inode, size and time of change."""
        stamps: dict[Path, tuple[int, int, int]] = {}
        for path in self._all() if is_last else self._finished_already():
            # A checkpoint may be pruned right now.
            with suppress(FileNotFoundError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    stamps[path] = (about.st_ino, about.st_size, about.st_mtime_ns)
        return stamps

    def _finished_already(self) -> Iterator[Path]:
        """Yields the files that are finished while the run has not ended."""
        folder = self._run.folder.path
        for checkpoint in sorted(folder.glob(f"{CHECKPOINTS}/[!.]*")):
            yield from _files_in(checkpoint)
        for path in sorted(folder.glob("[!.]*")):
            if path.suffix in _DOCUMENTS and self._is_of_run(path):
                yield path
        for output in self._started.outputs:
            path = self._run.workspace / output
            for document in sorted(path.with_name(f".{path.name}").glob("[!.]*")):
                if document.suffix in _DOCUMENTS:
                    yield document

    def _all(self) -> Iterator[Path]:
        yield from filter(self._is_of_run, _files_in(self._run.folder.path))
        outputs = self._started.outputs
        parents = {(self._run.workspace / output).parent for output in outputs}
        found = {path for parent in parents for path in _files_in(parent)}
        for path in sorted(found):
            name = self._name(path)
            if is_output(name, outputs) and not self._is_in_run_folder(name):
                yield path

    def _name(self, path: Path) -> str:
        return path.relative_to(self._run.workspace).as_posix()

    def _is_of_run(self, path: Path) -> bool:
        return is_of_run_folder(self._name(path), self._run.run_id)

    def _is_in_run_folder(self, name: str) -> bool:
        return name.startswith(f"runs/{self._run.run_id}/")

    def _is_only_sent(self, file: RemoteFile, *, is_last: bool) -> bool:
        """Returns whether a file only looks like an output: it was sent, and is as it was."""
        is_as_sent = self._started.placed.get(file.path) == file.sha256
        return is_as_sent and not (is_last and self._is_in_run_folder(file.path))


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and those below, in order, without what is being written."""
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_temporary(name))
        for name in sorted(names):
            if not is_temporary(name):
                yield Path(above, name)

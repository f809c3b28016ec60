"""The growing files of a run: its log and events, its journals and the rows that it appends."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec

from stillroom.errors import DataError
from stillroom.files import read_json, write_json
from stillroom.remote.agent.agent_run import AgentRun
from stillroom.remote.records import AppendedLines
from stillroom.remote.run_files import is_temporary

_BLOCK = 1 << 20
_LONGEST_LINE = 256 << 20
_LOG_LINE = 1 << 16
"""A log may hold progress bars, which end no line for hours."""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The content of seen.json: which file each path was when it was last sent."""

    inodes: dict[str, int] = {}


class AppendedFiles:
    """Yields what has been appended to files since they were last looked at."""

    def __init__(self, place: AgentRun, seen: Mapping[str, int], outputs: Sequence[str]) -> None:
        self._place, self._outputs = place, outputs
        self._offsets = dict(seen)
        self._file = place.base / "seen.json"
        self._inodes: dict[str, int] = {}
        with suppress(FileNotFoundError, DataError):
            self._inodes = dict(read_json(self._file, _Seen).inodes)

    def paths(self) -> set[str]:
        """Returns the growing files there are, relative to the workspace."""
        workspace, folder = self._place.workspace, self._place.folder.path
        found = [folder / "log.txt", *sorted(folder.glob("*.jsonl"))]
        for output in self._outputs:
            found += _appended(workspace / output)
        names = [path for path in found if path.is_file() and not path.is_symlink()]
        shown = [path for path in names if not is_temporary(path.name)]
        return {path.relative_to(workspace).as_posix() for path in shown}

    def news(self, *, is_last: bool) -> Iterator[AppendedLines]:
        """Yields the whole new lines of all files; of a log that has ended, all that is left."""
        for path in sorted(self.paths()):
            # It may be put in place anew, or taken away, right now.
            with suppress(FileNotFoundError):
                yield from self._news_of(path, is_last=is_last and path.endswith("/log.txt"))

    def _news_of(self, path: str, *, is_last: bool) -> Iterator[AppendedLines]:
        with (self._place.workspace / path).open("rb", buffering=0) as stream:
            inode = os.fstat(stream.fileno()).st_ino
            size = stream.seek(0, 2)
            offset = self._offsets.get(path, 0)
            is_new = self._inodes.get(path, inode if offset <= size else 0) != inode
            if offset > size or is_new:
                # A log that was too long was cut anew, or a file was written anew.
                offset = 0
                yield AppendedLines(path=path, offset=0, data=b"")
            self._remember(path, inode)
            while data := _lines(stream, offset, path, is_last=is_last):
                yield AppendedLines(path=path, offset=offset, data=data)
                offset += len(data)
                self._offsets[path] = offset
            self._offsets[path] = offset

    def _remember(self, path: str, inode: int) -> None:
        """Notes the file before its bytes are sent, so that a later connection knows it again."""
        if self._inodes.get(path) != inode:
            self._inodes[path] = inode
            # A full disk must not keep anybody from hearing of it.
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

"""Downloads the finished files of a run, verifies each, and renames it into place."""

import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Self

from stillroom.files import file_sha256, partial_name
from stillroom.models.resolve import CHECKPOINTS, FINAL
from stillroom.places import make_folder, open_real, real_folder
from stillroom.remote.follower.local_run import (
    DownloadedFile,
    FollowRecord,
    read_downloaded,
    stamp_of,
    write_downloaded,
)
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.records import RemoteFile, RemoteFiles
from stillroom.remote.run_files import download_unit, is_downloaded_run_file, is_output
from stillroom.run_folder import RunFolder

_CONFLICT_FOLDER = "brought_back"
"""The run's subfolder for outputs whose paths another process has written to during the run."""
_TRIES = 3

Fetch = Callable[[str, int], Generator[bytes]]
"""A function that yields the bytes of a remote file, given its path and an offset."""


class StoppedError(Exception):
    """The download was stopped in the middle of a file; the next call resumes it."""


class Download:
    """Downloads the finished files of a run to where a local run would have written them."""

    def __init__(
        self,
        folder: RunFolder,
        root: Path,
        outputs: Sequence[str],
        record: FollowRecord,
        fetch: Fetch,
    ) -> None:
        self._folder, self._root, self._outputs = folder, root, list(outputs)
        # In a folder that existed before the run, only individual files are replaced.
        self._new_outputs = [output for output in outputs if output not in record.initial_stamps]
        self._record, self._fetch = record, fetch
        self._downloaded = read_downloaded(folder)
        self._by_hash = {file.sha256: path for path, file in self._downloaded.items()}
        self._is_stopped: Callable[[], bool] = lambda: False
        self.num_bytes_done = 0
        """The number of bytes downloaded so far."""
        self.num_bytes_total = 0
        """The total number of bytes to download for the latest list of files."""
        self.conflicts: list[str] = []
        """The outputs in `brought_back/`: another process has written to their own paths."""

    def download_missing(
        self, files: Sequence[RemoteFile], *, is_last: bool, is_stopped: Callable[[], bool]
    ) -> None:
        """Downloads the files that are missing locally, resuming partial ones.

        Also deletes local files that the run has deleted. Raises StoppedError once `is_stopped`,
        UnreachableError, MachineError, or OSError if the disk is full.
        """
        allowed = [file for file in files if self._is_allowed(file.path)]
        self._is_stopped = is_stopped
        self.num_bytes_total = self.num_bytes_done + self.bytes_missing(allowed)
        for unit, members in self._units(allowed):
            self._check_stopped()
            if all(map(self._is_local, members)):
                continue
            if unit == members[0].path:
                self._download_file(members[0])
            else:
                self._download_folder(unit, members)
        self._prune({file.path for file in allowed}, is_last=is_last)
        self.conflicts = sorted({file.path for file in allowed if not self._is_in_place(file)})

    def bytes_missing(self, files: Sequence[RemoteFile]) -> int:
        """Returns how many bytes of the files are missing locally."""
        return sum(f.num_bytes for f in files if self._is_allowed(f.path) and not self._is_local(f))

    def _is_allowed(self, path: str) -> bool:
        """Whether the machine may write this path: only the run's own folder and its outputs."""
        return self._is_in_folder(path) or is_output(path, self._outputs)

    def _is_in_folder(self, path: str) -> bool:
        return is_downloaded_run_file(path, self._folder.run_id)

    def _unit_of_file(self, file: RemoteFile) -> str:
        return download_unit(file.path, self._new_outputs)

    def _units(self, files: Iterable[RemoteFile]) -> list[tuple[str, list[RemoteFile]]]:
        """Groups files that are renamed into place together, in the order of download.

        Small files come before checkpoints, and the newest checkpoint before older ones, since the
        machine may be lost during the download.
        """
        ordered = sorted(files, key=self._unit_of_file)
        units = [(name, list(group)) for name, group in groupby(ordered, self._unit_of_file)]
        checkpoints = [each for each in units if _is_checkpoint(each[0])]
        checkpoints.sort(key=lambda each: _age_key(each[0]), reverse=True)
        return [each for each in units if not _is_checkpoint(each[0])] + checkpoints

    def _is_local(self, file: RemoteFile) -> bool:
        """Returns whether a file is downloaded, to its own path or to `brought_back/`."""
        return self._is_in_place(file) or self._has_content(self._conflict_path(file.path), file)

    def _is_in_place(self, file: RemoteFile) -> bool:
        return self._has_content(self._root / file.path, file)

    def _has_content(self, target: Path, file: RemoteFile) -> bool:
        """Returns whether a local path has the file's content."""
        if not target.is_file() or target.is_symlink() or target.stat().st_size != file.num_bytes:
            return False
        if self._is_as_downloaded(target, file):
            return True
        if file_sha256(target) != file.sha256:
            return False
        self._record_download(target, file)
        return True

    def _conflict_path(self, path: str) -> Path:
        return self._folder.path / _CONFLICT_FOLDER / path

    def _download_file(self, file: RemoteFile) -> None:
        """Downloads one file next to its target, and renames it."""
        target = self._target_path(file.path)
        staged = target.with_name(partial_name(target.name, self._folder.run_id))
        self._fetch_to(file, staged)
        with real_folder(target.parent) as parent:
            parent.rename(staged.name, target.name)
        self._record_download(target, file)

    def _download_folder(self, unit: str, files: Sequence[RemoteFile]) -> None:
        """Downloads the files of a folder next to their target, and renames the folder."""
        target = self._target_path(unit)
        staged = target.with_name(partial_name(target.name, self._folder.run_id))
        by_name = {file.path.removeprefix(f"{unit}/"): file for file in files}
        for name, file in by_name.items():
            make_folder((staged / name).parent)
            self._fetch_to(file, staged / name)
        for leftover in [path for path in staged.rglob("*") if path.is_file()]:
            if leftover.relative_to(staged).as_posix() not in by_name:
                leftover.unlink()
        _replace_folder(staged, target)
        for name, file in by_name.items():
            self._record_download(target / name, file)

    def _fetch_to(self, file: RemoteFile, staged: Path) -> None:
        """Downloads a file to `staged`, resuming a partial download, and verifies its hash.

        Raises UnreachableError if the connection is lost, and MachineError if three downloads
        differ from the hash that the machine reported.
        """
        # A local file may have the same content, e.g. the final checkpoint and that of its step.
        twin = self._root / self._by_hash.get(file.sha256, "")
        if not staged.exists() and twin.is_file() and self._is_as_downloaded(twin, file):
            make_folder(staged.parent)
            os.link(twin, staged)
        for _ in range(_TRIES):
            self._download_to(file, staged)
            if staged.stat().st_size == file.num_bytes and file_sha256(staged) == file.sha256:
                return
            staged.unlink()
        raise MachineError(
            f"the hash of {file.path} differs from the one its machine reported, after {_TRIES} "
            "downloads",
            "check the memory and disk of that machine; the download is retried",
        )

    def _download_to(self, file: RemoteFile, staged: Path) -> None:
        """Appends the missing bytes of a file to `staged`, and syncs it to disk."""
        with os.fdopen(open_real(staged, os.O_WRONLY | os.O_CREAT), "wb") as stream:
            offset = stream.seek(0, os.SEEK_END)
            if offset > file.num_bytes:
                stream.truncate(0)
                offset = stream.seek(0)
            if offset < file.num_bytes:
                with closing(self._fetch(file.path, offset)) as blocks:
                    for block in blocks:
                        if stream.tell() + len(block) > file.num_bytes:
                            raise MachineError(
                                f"{file.path} has more bytes than its machine reported",
                                "check what is running on that machine; the download is retried",
                            )
                        stream.write(block)
                        self.num_bytes_done += len(block)
                        self._check_stopped()
            stream.flush()
            os.fsync(stream.fileno())
        if staged.stat().st_size < file.num_bytes:
            raise UnreachableError(
                f"{file.path} was only partially downloaded",
                "no action needed: the download is resumed",
            )

    def _is_as_downloaded(self, target: Path, file: RemoteFile) -> bool:
        """Returns whether a path still has this content since its download, by size and mtime."""
        record, status = self._downloaded.get(self._relative_path(target)), target.stat()
        return (
            record is not None
            and record.sha256 == file.sha256
            and (status.st_mtime_ns, status.st_size) == (record.changed_at, file.num_bytes)
        )

    def _target_path(self, path: str) -> Path:
        """Returns where to write an output.

        That is its own path, or `brought_back/` if another process changed the file there.
        """
        target = self._root / path
        if self._is_in_folder(path) or not target.exists() or self._is_unmodified(path, target):
            return target
        return self._conflict_path(path)

    def _is_unmodified(self, path: str, target: Path) -> bool:
        """Returns whether no other process has changed an output since the run was started."""
        if self._record.initial_stamps.get(path) == stamp_of(target):
            return True
        if target.is_dir():
            return False
        status = target.stat()
        grown, downloaded = self._record.grown.get(path), self._downloaded.get(path)
        stamps = [(grown.local_bytes, grown.changed_at)] if grown is not None else []
        stamps += [(downloaded.num_bytes, downloaded.changed_at)] if downloaded is not None else []
        return (status.st_size, status.st_mtime_ns) in stamps

    def _prune(self, paths: set[str], *, is_last: bool) -> None:
        """Deletes what the run deleted: old checkpoints, and when it has ended, journals too."""
        remote = {
            unit for path in paths if _is_checkpoint(unit := download_unit(path, self._new_outputs))
        }
        local = {download_unit(path, self._new_outputs) for path in self._downloaded}
        newest = max(remote, key=_age_key, default="")
        for unit in sorted(filter(_is_checkpoint, local - remote)):
            if is_last or (newest and _age_key(unit) < _age_key(newest)):
                self._delete(unit)
        if is_last:
            self._prune_journals(paths)
        # Partial downloads of checkpoints that the run has deleted since.
        for leftover in (self._folder.path / CHECKPOINTS).glob(f".*.partial-{self._folder.run_id}"):
            shutil.rmtree(leftover, ignore_errors=True)
        write_downloaded(self._folder, self._downloaded)

    def _prune_journals(self, paths: set[str]) -> None:
        """Deletes the journals that the run deleted at its end."""
        for path in self._record.grown.keys() - paths:
            target = self._root / path
            if self._is_in_folder(path) or not target.is_file():
                continue
            if is_output(path, self._outputs) and self._is_unmodified(path, target):
                target.unlink()

    def _delete(self, unit: str) -> None:
        """Deletes a downloaded checkpoint, and removes its files from the record."""
        target = self._root / unit
        temporary = target.with_name(f".{target.name}.going")
        # Renamed first, so that a half-deleted checkpoint is never seen.
        with suppress(FileNotFoundError):
            target.rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        for path in [path for path in self._downloaded if path.startswith(f"{unit}/")]:
            del self._downloaded[path]

    def _record_download(self, target: Path, file: RemoteFile) -> None:
        self._downloaded[self._relative_path(target)] = DownloadedFile(
            sha256=file.sha256, num_bytes=file.num_bytes, changed_at=target.stat().st_mtime_ns
        )
        self._by_hash[file.sha256] = self._relative_path(target)

    def _relative_path(self, target: Path) -> str:
        return target.relative_to(self._root).as_posix()

    def _check_stopped(self) -> None:
        if self._is_stopped():
            raise StoppedError


class Downloader:
    """A thread that downloads the latest list of files while mirroring continues."""

    def __init__(self, download: Download) -> None:
        self._download = download
        self._condition = threading.Condition()
        self._submitted: RemoteFiles | None = None
        self._done: RemoteFiles | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, files: RemoteFiles) -> None:
        """Schedules these files for download, replacing the previous list."""
        with self._condition:
            self._submitted = files
            self._condition.notify()

    def is_done(self, files: RemoteFiles) -> bool:
        """Returns whether all of these files are downloaded."""
        return self._done is files

    def raise_error(self) -> None:
        """Raises the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Downloads each list that is submitted, until the downloader is closed."""
        try:
            with suppress(StoppedError):
                while (listed := self._next_list()) is not None:
                    self._download_files(listed)
                    self._done = listed
        # The follower's thread raises it, in `raise_error`.
        except BaseException as error:
            self._error = error

    def _download_files(self, listed: RemoteFiles) -> None:
        """Downloads a list of files."""
        try:
            self._download.download_missing(
                listed.files, is_last=listed.is_last, is_stopped=lambda: self._is_closed
            )
        except MachineError:
            # The run may have just deleted a checkpoint, as the next list will show.
            if listed.is_last:
                raise

    def _next_list(self) -> RemoteFiles | None:
        with self._condition:
            while self._submitted is self._done and not self._is_closed:
                self._condition.wait()  # no limit: `__exit__` notifies it
            return None if self._is_closed else self._submitted

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()  # no limit: each read of the download has a timeout


def _is_checkpoint(unit: str) -> bool:
    return Path(unit).parent.name == CHECKPOINTS


def _age_key(unit: str) -> tuple[bool, str]:
    """Returns a sort key that orders checkpoints by age: by step, then the final one."""
    return Path(unit).name == FINAL, unit


def _replace_folder(staged: Path, target: Path) -> None:
    """Renames a staged folder to its final path, replacing an older one."""
    with real_folder(target.parent) as parent:
        replaced = f".{target.name}.going"
        if target.exists():
            parent.rename(target.name, replaced)
        parent.rename(staged.name, target.name)
    shutil.rmtree(target.with_name(replaced), ignore_errors=True)

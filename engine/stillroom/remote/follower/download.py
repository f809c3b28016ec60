"""Brings the finished files of a run back: each whole and verified, put in place by a rename."""

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from stillroom.files import file_sha256, partial_name
from stillroom.models.resolve import CHECKPOINTS, FINAL
from stillroom.places import make_folder, real_folder
from stillroom.remote.follower.fetch import Fetch, fetch_file
from stillroom.remote.follower.record import (
    DownloadedFile,
    FollowRecord,
    read_downloaded,
    write_downloaded,
)
from stillroom.remote.records import RemoteFile
from stillroom.remote.run_files import is_of_run_folder, is_output, unit_of
from stillroom.run_folder import RunFolder, fixed_inputs

APART = "brought_back"
"""The folder of a run in which outputs lie whose own places somebody else has taken meanwhile."""


class StoppedError(Exception):
    """Bringing back was stopped in the middle of a file; another call goes on there."""


class Download:
    """Puts the finished files of a run where a run here would have written them."""

    def __init__(
        self,
        folder: RunFolder,
        root: Path,
        outputs: Sequence[str],
        record: FollowRecord,
        fetch: Fetch,
    ) -> None:
        self._folder, self._root, self._outputs = folder, root, list(outputs)
        # Of a folder that was here before, only single files are replaced.
        self._new = [output for output in outputs if output not in record.before]
        self._record, self._fetch = record, fetch
        self._files = read_downloaded(folder)
        self._by_hash = {known.sha256: path for path, known in self._files.brought.items()}
        self._is_stopped: Callable[[], bool] = lambda: False
        self.num_bytes = 0
        """The bytes that were fetched."""
        self.num_wanted = 0
        """The bytes that are fetched once all files are here that were told of last."""
        self.taken: list[str] = []
        """The outputs whose places somebody else has taken; they lie in `brought_back/`."""

    def take(
        self, files: Sequence[RemoteFile], *, is_last: bool, is_stopped: Callable[[], bool]
    ) -> None:
        """Brings back what is not here yet.

        Raises StoppedError once `is_stopped`, UnreachableError, MachineError, or OSError if the
        disk is full; a later call goes on.
        """
        allowed = [file for file in files if self._may_come(file.path)]
        self._is_stopped = is_stopped
        self.num_wanted = self.num_bytes + self.bytes_missing(allowed)
        for unit, members in self._units(allowed):
            self._stop_here()
            missing = [file for file in members if not self._is_here(file)]
            if missing and unit != members[0].path:
                self._download_folder(unit, members)
            elif missing:
                self._download_file(members[0])
        self._prune({file.path for file in allowed}, is_last=is_last)
        self.taken = sorted({file.path for file in allowed if not self._is_in_place(file)})

    def bytes_missing(self, files: Sequence[RemoteFile]) -> int:
        """Returns how many bytes of the files are not here yet."""
        return sum(f.num_bytes for f in files if self._may_come(f.path) and not self._is_here(f))

    def _may_come(self, path: str) -> bool:
        """No machine may write anything but the run's own folder and its outputs."""
        in_folder = is_of_run_folder(path, self._folder.run_id)
        return in_folder or is_output(path, self._outputs)

    def _units(self, files: Iterable[RemoteFile]) -> list[tuple[str, list[RemoteFile]]]:
        """Returns what is put in place together: small files first, and the newest checkpoint.

        The machine may be gone before all is here.
        """

        def unit(file: RemoteFile) -> str:
            return unit_of(file.path, self._new)

        units = [(name, list(group)) for name, group in groupby(sorted(files, key=unit), unit)]
        checkpoints = [each for each in units if _is_checkpoint(each[0])]
        checkpoints.sort(key=lambda each: _age(each[0]), reverse=True)
        return [each for each in units if not _is_checkpoint(each[0])] + checkpoints

    def _is_here(self, file: RemoteFile) -> bool:
        return self._is_in_place(file) or self._is_at(self._apart(file.path), file)

    def _is_in_place(self, file: RemoteFile) -> bool:
        return self._is_at(self._root / file.path, file)

    def _is_at(self, place: Path, file: RemoteFile) -> bool:
        """Returns whether a file's verified content lies at a place."""
        if not place.is_file() or place.is_symlink() or place.stat().st_size != file.num_bytes:
            return False
        if self._is_same(place, file):
            return True
        if file_sha256(place) != file.sha256:
            return False
        self._note(place, file)
        return True

    def _apart(self, path: str) -> Path:
        return self._folder.path / APART / path

    def _download_file(self, file: RemoteFile) -> None:
        place = self._free_place(file.path)
        staged = place.with_name(partial_name(place.name, self._folder.run_id))
        self._fetch_to(file, staged)
        with real_folder(place.parent) as parent:
            parent.rename(staged.name, place.name)
        self._note(place, file)

    def _download_folder(self, unit: str, files: Sequence[RemoteFile]) -> None:
        place = self._free_place(unit)
        staged = place.with_name(partial_name(place.name, self._folder.run_id))
        for file in files:
            inside = file.path.removeprefix(f"{unit}/")
            here = place / inside
            make_folder((staged / inside).parent)
            if here.is_file() and self._is_same(here, file):
                with suppress(FileExistsError):
                    os.link(here, staged / inside)
            self._fetch_to(file, staged / inside)
        keep = {file.path.removeprefix(f"{unit}/") for file in files}
        for left in [path for path in staged.rglob("*") if path.is_file()]:
            if left.relative_to(staged).as_posix() not in keep:
                left.unlink()
        _put_folder(staged, place)
        for file in files:
            self._note(place / file.path.removeprefix(f"{unit}/"), file)

    def _fetch_to(self, file: RemoteFile, staged: Path) -> None:
        known = self._known_copy(file)
        if known is not None and not staged.exists():
            make_folder(staged.parent)
            os.link(known, staged)
        fetch_file(file, staged, self._fetch, self._count)

    def _known_copy(self, file: RemoteFile) -> Path | None:
        """Returns a file here with the same content: a last checkpoint is that of its step."""
        path = self._by_hash.get(file.sha256)
        if path is None:
            return None
        place = self._root / path
        return place if place.is_file() and self._is_same(place, file) else None

    def _is_same(self, place: Path, file: RemoteFile) -> bool:
        known, about = self._files.brought.get(self._name(place)), place.stat()
        return (
            known is not None
            and known.sha256 == file.sha256
            and (about.st_mtime_ns, about.st_size) == (known.changed_at, file.num_bytes)
        )

    def _free_place(self, path: str) -> Path:
        """Returns where an output goes: beside, if somebody else has taken its own place."""
        place = self._root / path
        in_folder = is_of_run_folder(path, self._folder.run_id)
        if in_folder or not place.exists() or self._is_ours(path, place):
            return place
        return self._apart(path)

    def _is_ours(self, path: str, place: Path) -> bool:
        """Returns whether what lies there is as it was at the start, or as it was brought back."""
        if self._record.before.get(path) == stamp_of(place):
            return True
        if place.is_dir():
            return False
        about = place.stat()
        grown, known = self._record.grown.get(path), self._files.brought.get(path)
        sizes = [(grown.here, grown.changed_at)] if grown is not None else []
        sizes += [(known.num_bytes, known.changed_at)] if known is not None else []
        return (about.st_size, about.st_mtime_ns) in sizes

    def _prune(self, there: set[str], *, is_last: bool) -> None:
        """Deletes what the run itself has deleted; a checkpoint only once a newer one is here."""
        kept = {unit for path in there if _is_checkpoint(unit := unit_of(path, self._new))}
        known = {unit_of(path, self._new) for path in self._files.brought}
        newest = max(kept, key=_age, default="")
        for unit in sorted(filter(_is_checkpoint, known - kept)):
            if is_last or (newest and _age(unit) < _age(newest)):
                self._delete(unit)
        if is_last:
            self._prune_journals(there)
        # What was begun of a checkpoint that is gone by now; all others are whole.
        for left in (self._folder.path / CHECKPOINTS).glob(f".*.partial-{self._folder.run_id}"):
            shutil.rmtree(left, ignore_errors=True)
        write_downloaded(self._folder, self._files)

    def _prune_journals(self, there: set[str]) -> None:
        """Deletes the journals that the run has deleted when it was done."""
        for path in self._record.grown.keys() - there:
            place = self._root / path
            if is_of_run_folder(path, self._folder.run_id) or not place.is_file():
                continue
            if is_output(path, self._outputs) and self._is_ours(path, place):
                place.unlink()

    def _delete(self, unit: str) -> None:
        place = self._root / unit
        going = place.with_name(f".{place.name}.going")
        # Renamed first, so that nobody sees a checkpoint that is half deleted.
        with suppress(FileNotFoundError):
            place.rename(going)
        shutil.rmtree(going, ignore_errors=True)
        self._forget(unit)

    def _forget(self, unit: str) -> None:
        for path in [p for p in self._files.brought if p.startswith(f"{unit}/")]:
            del self._files.brought[path]

    def _note(self, place: Path, file: RemoteFile) -> None:
        about = place.stat()
        self._files.brought[self._name(place)] = DownloadedFile(
            sha256=file.sha256, num_bytes=file.num_bytes, changed_at=about.st_mtime_ns
        )
        self._by_hash[file.sha256] = self._name(place)

    def _name(self, place: Path) -> str:
        return place.relative_to(self._root).as_posix()

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._stop_here()

    def _stop_here(self) -> None:
        if self._is_stopped():
            raise StoppedError


def _is_checkpoint(unit: str) -> bool:
    return Path(unit).parent.name == CHECKPOINTS


def _age(unit: str) -> tuple[bool, str]:
    """Orders checkpoints as they are written: those of steps, and then the last one."""
    return Path(unit).name == FINAL, unit


def stamp_of(path: Path) -> str:
    """Returns a text that changes with a file, or with the files of a folder."""
    return fixed_inputs([path])[0].stamp


def _put_folder(staged: Path, place: Path) -> None:
    """Renames a whole folder into its place; an older one there is deleted."""
    with real_folder(place.parent) as parent:
        going = f".{place.name}.going"
        if place.exists():
            parent.rename(place.name, going)
        parent.rename(staged.name, place.name)
    shutil.rmtree(place.with_name(going), ignore_errors=True)

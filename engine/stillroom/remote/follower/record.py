"""What a follower has to remember so that another one can go on where it was killed."""

from contextlib import suppress

import msgspec

from stillroom.errors import DataError
from stillroom.files import read_json, write_json
from stillroom.run_folder import MIRROR_FILE, MIRRORED_FILE, RunFolder


class GrownFile(msgspec.Struct, frozen=True, kw_only=True):
    """How far a growing file has been mirrored."""

    there: int
    """The bytes of it there that are here."""
    here: int
    """The size that they have here, where texts name other paths."""
    changed_at: int = 0
    """When the file here was written last (`st_mtime_ns`)."""


class DownloadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was brought back and verified, and how it was then."""

    sha256: str
    num_bytes: int
    changed_at: int


class FollowRecord(msgspec.Struct, kw_only=True):
    """The content of remote_mirror.json."""

    used_since: float | None = None
    """When the machine answered first, in seconds since the epoch; None if it never has."""
    before_start_s: float = 0.0
    """How long the machine had been used when the run was started."""
    is_started: bool = False
    """Whether the machine has confirmed the start."""
    price_per_hour: float | None = None
    elapsed_s: float = 0.0
    """The seconds since the start, by the clock there, when it was heard last."""
    clock_ahead_s: float | None = None
    """How far the clock there is ahead."""
    contact_at: float | None = None
    """When the machine answered last, in seconds since the epoch."""
    root: str | None = None
    """The run's folder there."""
    bytes_per_s: float | None = None
    """How fast files were sent."""
    grown: dict[str, GrownFile] = {}
    left_alone: list[str] = []
    """Growing files beside the run's folder that somebody else has changed here."""
    before: dict[str, str] = {}
    """The stamps of outputs that were here when the run was started."""


class DownloadedFiles(msgspec.Struct, kw_only=True):
    """The content of remote_files.json."""

    brought: dict[str, DownloadedFile] = {}
    """By the paths relative to the workspace."""


def read_record(folder: RunFolder) -> FollowRecord:
    """Returns what the follower before this one has written."""
    with suppress(FileNotFoundError, DataError):
        return read_json(folder.path / MIRROR_FILE, FollowRecord)
    return FollowRecord()


def write_record(folder: RunFolder, record: FollowRecord, *, durable: bool = False) -> None:
    """Writes what the follower after this one needs."""
    write_json(folder.path / MIRROR_FILE, record, durable=durable)


def read_downloaded(folder: RunFolder) -> DownloadedFiles:
    """Returns the files that were brought back."""
    with suppress(FileNotFoundError, DataError):
        return read_json(folder.path / MIRRORED_FILE, DownloadedFiles)
    return DownloadedFiles()


def write_downloaded(folder: RunFolder, files: DownloadedFiles) -> None:
    """Writes which files were brought back."""
    write_json(folder.path / MIRRORED_FILE, files, durable=False)

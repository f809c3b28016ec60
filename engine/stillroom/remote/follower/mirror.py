"""Mirrors the state and growing files of a remote run into its local folder."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from stillroom import bounds
from stillroom.files import write_atomic
from stillroom.places import open_real
from stillroom.remote.follower.local_run import FollowRecord, GrownFile, write_record
from stillroom.remote.frames import quote_remote_fix
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.records import AppendedLines, JobSpec, RemoteState
from stillroom.remote.run_files import LOG_FILES, is_downloaded_run_file, is_output
from stillroom.run_folder import RunFailure, RunFolder, RunState
from stillroom.types import RunStatus

_CLOCK_TOLERANCE_S = 2.0
"""Two measurements of the machine's clock offset differ by less, unless a clock was set."""
_MAX_GROWING_FILES = bounds.GROWING_FILES.limit
_NEW_FILE = GrownFile(remote_bytes=0, local_bytes=0)


class OutOfSyncError(Exception):
    """An update does not start at the end of the local file, so updates are requested again."""


class Mirror:
    """Writes the state and the growing files of a run; nothing else writes its run.json."""

    def __init__(self, folder: RunFolder, spec: JobSpec, root: Path, record: FollowRecord) -> None:
        self._folder, self._spec, self._root, self._record = folder, spec, root, record
        self._path_replacements = self._make_replacements()
        self.final: RunState | None = None
        """The run's final state, once it has ended on its machine; None before."""

    @property
    def seen(self) -> dict[str, int]:
        """The number of remote bytes of each growing file that have been mirrored."""
        return {path: grown.remote_bytes for path, grown in self._record.grown.items()}

    def write_state(self, update: RemoteState) -> None:
        """Writes the run's state; an ended run stays `running` until its files are downloaded."""
        record = self._record
        ahead_s = update.clock - time.time()
        if record.clock_ahead_s is None or abs(ahead_s - record.clock_ahead_s) > _CLOCK_TOLERANCE_S:
            record.clock_ahead_s = ahead_s
        if record.root != update.root:
            record.root = update.root
            self._path_replacements = self._make_replacements()
        record.elapsed_s = max(record.elapsed_s, update.elapsed_s)
        try:
            remote = msgspec.json.decode(self._with_local_paths(update.run_json), type=RunState)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UnreachableError(
                f"{self._spec.machine.name} sent an invalid run state: {error}",
                "no action needed: Stillroom retries; if the error persists, check the machine "
                "with check_setup",
            ) from error
        error = remote.error
        if error is not None:
            problem, fix = quote_remote_fix(error.problem, error.fix)
            error = RunFailure(problem=problem, fix=fix)
        recorded = self._folder.read()
        state = msgspec.structs.replace(
            remote,
            error=error,
            run_id=self._folder.run_id,
            # Not the machine's choice: the kind decides which texts of the result are trusted.
            kind=recorded.kind,
            created_at=recorded.created_at,
            started_at=self._local_time(remote.started_at),
            ended_at=self._local_time(remote.ended_at),
            pid=None,
            process_start=None,
        )
        if state.status.is_final:
            self.final = state
            state = msgspec.structs.replace(
                state, status=RunStatus.RUNNING, ended_at=None, result=None, error=None
            )
        self._folder.write(state, durable=False)
        write_record(self._folder, record)

    def append_lines(self, lines: AppendedLines) -> None:
        """Appends to a growing file, unless the local file was changed by another process."""
        grown, path = self._record.grown, lines.path
        is_text = path.removeprefix(f"runs/{self._folder.run_id}/") in LOG_FILES
        is_run_file = is_text or is_downloaded_run_file(path, self._folder.run_id)
        if not is_run_file and not is_output(path, self._spec.outputs):
            return  # The machine may not write other local files.
        if path in self._record.changed_locally:
            return
        if path not in grown and len(grown) >= _MAX_GROWING_FILES:
            raise MachineError(
                f"{self._spec.machine.name} sent lines for more than {_MAX_GROWING_FILES} files",
                "check what is running on that machine",
            )
        mirrored, local_file = grown.get(path, _NEW_FILE), self._root / path
        if lines.offset == 0 and mirrored.remote_bytes:
            if not is_run_file:
                # Paid rows are not deleted; the whole file is downloaded at the end.
                self._stop_mirroring(path)
                return
            write_atomic(local_file, b"", durable=False)
            mirrored = _NEW_FILE
        if lines.offset != mirrored.remote_bytes:
            raise OutOfSyncError(path)
        if is_run_file and _is_shorter(local_file, mirrored.local_bytes):
            grown.pop(path)
            raise OutOfSyncError(path)
        data = self._with_local_paths(lines.data) if is_text else lines.data
        if not _append(local_file, mirrored.local_bytes, data, is_run_file=is_run_file):
            self._stop_mirroring(path)
            return
        grown[path] = GrownFile(
            remote_bytes=lines.offset + len(lines.data),
            local_bytes=mirrored.local_bytes + len(data),
            changed_at=local_file.stat().st_mtime_ns,
        )
        write_record(self._folder, self._record)

    def _stop_mirroring(self, path: str) -> None:
        """Stops mirroring a file that another process has changed; it is downloaded at the end."""
        self._record.changed_locally.append(path)
        write_record(self._folder, self._record)

    def _make_replacements(self) -> list[tuple[bytes, bytes]]:
        """Returns pairs of a remote path and the local path that replaces it, longest first.

        Remote paths are unique, since they contain the run's random id.
        """
        root = self._record.root
        if root is None:
            return []
        pairs = [
            (f"{root}/{path.remote_path}", path.home_path)
            for path in self._spec.home_paths
            if path.home_path != "~" and not path.remote_path.startswith("package:")
        ]
        pairs.append((f"{root}/workspace", str(self._root)))
        pairs.sort(key=lambda pair: -len(pair[0]))
        return [(remote.encode(), local.encode()) for remote, local in pairs]

    def _with_local_paths(self, text: bytes) -> bytes:
        """Returns a text with the machine's paths replaced by local ones."""
        for remote, local in self._path_replacements:
            text = text.replace(remote, local)
        return text

    def _local_time(self, timestamp: str | None) -> str | None:
        """Converts a timestamp of the machine's clock to the local clock."""
        shift = timedelta(seconds=self._record.clock_ahead_s or 0.0)
        if timestamp is None or abs(shift) < timedelta(seconds=_CLOCK_TOLERANCE_S):
            return timestamp
        try:
            shifted = (datetime.fromisoformat(timestamp) - shift).astimezone(UTC)
        except (ValueError, OverflowError):
            return timestamp
        return shifted.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_shorter(path: Path, num_bytes: int) -> bool:
    return (path.stat().st_size if path.exists() else 0) < num_bytes


def _append(path: Path, size: int, data: bytes, *, is_run_file: bool) -> bool:
    """Appends to a file of `size` bytes; returns False if another process has changed it.

    It may already end with a part of the data, which a follower that was killed has written.
    """
    with os.fdopen(open_real(path, os.O_RDWR | os.O_CREAT), "r+b") as stream:
        excess = stream.seek(0, os.SEEK_END) - size
        if excess and not is_run_file:
            stream.seek(max(0, size))
            if excess < 0 or not data.startswith(stream.read(len(data) + 1)):
                return False
        stream.truncate(size)
        stream.seek(size)
        stream.write(data)
    return True

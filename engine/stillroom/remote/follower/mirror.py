"""Keeps the folder of a run here as the run's folder on its machine is."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from stillroom.files import write_atomic
from stillroom.places import open_real
from stillroom.remote.follower.record import FollowRecord, GrownFile, write_record
from stillroom.remote.follower.texts import HomeTexts
from stillroom.remote.records import AppendedLines, JobSpec, RemoteState
from stillroom.remote.run_files import TEXTS, is_of_run_folder, is_output
from stillroom.run_folder import RunFolder, RunState
from stillroom.types import RunStatus

_STEADY_S = 2.0
"""Two measurements of the other clock differ by no more while neither clock is set."""


class OutOfStepError(Exception):
    """A growing file is not told about from where it is known; it is asked for again."""


class Mirror:
    """Writes the state and the growing files of a run; the only writer of its run.json."""

    def __init__(self, folder: RunFolder, spec: JobSpec, root: Path, record: FollowRecord) -> None:
        self._folder, self._spec, self._root, self._record = folder, spec, root, record
        self._texts = HomeTexts(spec, str(root), record.root) if record.root else None
        self.final: RunState | None = None
        """The run's last state, once it has ended on its machine."""

    @property
    def seen(self) -> dict[str, int]:
        """The bytes of each growing file there that are here."""
        return {path: grown.there for path, grown in self._record.grown.items()}

    def take_state(self, news: RemoteState) -> None:
        """Writes the run's state; one that has ended is still `running` until all of it is here."""
        record = self._record
        ahead_s = news.clock - time.time()
        if record.clock_ahead_s is None or abs(ahead_s - record.clock_ahead_s) > _STEADY_S:
            record.clock_ahead_s = ahead_s
        if self._texts is None or record.root != news.root:
            record.root = news.root
            self._texts = HomeTexts(self._spec, str(self._root), news.root)
        record.elapsed_s = max(record.elapsed_s, news.elapsed_s)
        there = msgspec.json.decode(self._texts.home(news.run_json), type=RunState)
        state = msgspec.structs.replace(
            there,
            run_id=self._folder.run_id,
            created_at=self._folder.read().created_at,
            started_at=self._here(there.started_at),
            ended_at=self._here(there.ended_at),
            pid=None,
            pid_started_at=None,
            process_start=None,
        )
        if state.status.is_final:
            self.final = state
            state = msgspec.structs.replace(
                state, status=RunStatus.RUNNING, ended_at=None, result=None, error=None
            )
        self._folder.write(state, durable=False)
        write_record(self._folder, record)

    def take_growth(self, growth: AppendedLines) -> None:
        """Appends to a growing file, unless somebody else has changed it here meanwhile."""
        name = self._name_in_folder(growth.path)
        is_text, record = name in TEXTS, self._record
        is_own = is_text or is_of_run_folder(growth.path, self._folder.run_id)
        if not is_own and not is_output(growth.path, self._spec.outputs):
            return  # No machine may write anything else here.
        if growth.path in record.left_alone:
            return
        known = record.grown.get(growth.path, GrownFile(there=0, here=0))
        path = self._root / growth.path
        if growth.offset == 0 and known.there:
            if not is_own:
                # Rows that were paid for are not deleted; the whole file comes at the end.
                self._leave_alone(growth.path)
                return
            write_atomic(path, b"", durable=False)
            known = GrownFile(there=0, here=0)
        if growth.offset != known.there:
            raise OutOfStepError(growth.path)
        data = self._texts.home(growth.data) if is_text and self._texts else growth.data
        if is_own and known.here and not _has(path, known.here):
            record.grown.pop(growth.path)
            raise OutOfStepError(growth.path)
        if not _append(path, known.here, data, is_own=is_own):
            self._leave_alone(growth.path)
            return
        record.grown[growth.path] = GrownFile(
            there=growth.offset + len(growth.data),
            here=known.here + len(data),
            changed_at=path.stat().st_mtime_ns,
        )
        write_record(self._folder, record)

    def _leave_alone(self, path: str) -> None:
        self._record.left_alone.append(path)
        write_record(self._folder, self._record)

    def _name_in_folder(self, path: str) -> str | None:
        prefix = f"runs/{self._folder.run_id}/"
        return path.removeprefix(prefix) if path.startswith(prefix) else None

    def _here(self, moment: str | None) -> str | None:
        """Returns a moment of the clock there as the clock here had it."""
        if moment is None:
            return None
        shift = timedelta(seconds=self._record.clock_ahead_s or 0.0)
        if abs(shift) < timedelta(seconds=_STEADY_S):
            return moment
        try:
            shifted = datetime.fromisoformat(moment) - shift
        except ValueError:
            return moment
        return shifted.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _has(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size >= size


def _append(path: Path, size: int, data: bytes, *, is_own: bool) -> bool:
    """Makes a file of `size` bytes longer; False if it is not as it was left.

    A follower that was killed may have written a part of the same bytes.
    """
    with os.fdopen(open_real(path, os.O_RDWR | os.O_CREAT), "r+b") as stream:
        rest = stream.seek(0, os.SEEK_END) - size
        if rest and not is_own:
            stream.seek(max(0, size))
            if rest < 0 or not data.startswith(stream.read(len(data) + 1)):
                return False
        stream.truncate(size)
        stream.seek(size)
        stream.write(data)
    return True

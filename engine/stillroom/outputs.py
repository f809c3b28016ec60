"""Writes the outputs of operations: under a lock, and without replacing files of other programs.

Stillroom wrote a file if the manifest next to it contains its hash, and an HTML page if its last
line contains the hash of the page. Any other file was written or edited by somebody else.
"""

import fcntl
import glob
import hashlib
import os
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from stillroom import __version__
from stillroom.errors import InputError
from stillroom.files import LineWriter, atomic_output, partial_name, write_json
from stillroom.lineage import (
    FileRecord,
    Manifest,
    ModelRecord,
    manifest_path,
    matches_record,
    now,
    pending_manifest_path,
    record_written,
    recorded_files,
)
from stillroom.places import open_real, real_folder
from stillroom.validation import StrictModel

_PAGE_MARK = re.compile(rb"<!-- stillroom ([0-9a-f]{64}) -->\n\Z")
_OLD_PAGE_MARK = re.compile(rb"<footer>Written [^<]{1,40} by stillroom ")
_MAX_HOLDER_BYTES = 300
_TRIES, _RETRY_S = 5, 0.02


class OutputHeldError(InputError):
    """Another process, or another call in this process, is writing the output."""


def _drop_description(schema: dict[str, Any]) -> None:
    """Removes an option's description from a tool's schema, as the error explains the option."""
    schema.pop("description", None)


class ReplacingRequest(StrictModel):
    """A request whose output may replace an existing file."""

    overwrite: Annotated[
        bool,
        Field(
            description="Replace a file that stillroom did not write",
            json_schema_extra=_drop_description,
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class NewOutput:
    """The writers of an output and its side files, which are renamed once they are complete."""

    path: Path
    rows: LineWriter
    side: Mapping[Path, LineWriter]
    operation: str
    run_id: str | None

    def record(
        self,
        *,
        inputs: Sequence[FileRecord | ModelRecord],
        request: BaseModel,
        counts: Mapping[str, int],
        left_out: Mapping[str, int] | None = None,
    ) -> None:
        """Writes the manifest, which takes effect with the output. Call this last.

        `left_out` is the number of rows that were left out, by reason.
        """
        for writer in (self.rows, *self.side.values()):
            writer.flush()
        manifest = Manifest(
            operation=self.operation,
            output=record_written(self.path, self.rows),
            inputs=[record for record in inputs if isinstance(record, FileRecord)],
            models=[record for record in inputs if isinstance(record, ModelRecord)],
            request=request.model_dump(mode="json"),
            counts=dict(counts),
            run_id=self.run_id,
            stillroom_version=__version__,
            created_at=now(),
            side=[record_written(path, writer) for path, writer in self.side.items()],
            left_out=dict(left_out or {}),
        )
        write_json(pending_manifest_path(self.path), manifest)


@contextmanager
def new_output(
    path: Path, *side: Path, operation: str, overwrite: bool, run_id: str | None = None
) -> Generator[NewOutput]:
    """Yields writers for an output and its side files, which appear if the block raises no error.

    The block must call `record` last. The manifest is on the disk before the first file is
    replaced, so after a crash at any point, each file is known to be Stillroom's.
    Raises InputError if another process is writing the output, or if Stillroom did not write an
    existing file.
    """
    with output_lock(path, operation, run_id=run_id):
        check_replaceable(path, *side, overwrite=overwrite)
        # Files of killed processes; a process that is still writing would hold the lock.
        for file in (path, *side, pending_manifest_path(path)):
            for leftover in path.parent.glob(partial_name(glob.escape(file.name), "*")):
                leftover.unlink()
        with ExitStack() as stack:
            rows, *others = [stack.enter_context(atomic_output(file)) for file in (path, *side)]
            writers = dict(zip(side, others, strict=True))
            yield NewOutput(path, rows, writers, operation, run_id)
        with real_folder(path.parent) as folder:
            folder.rename(pending_manifest_path(path).name, manifest_path(path).name)


def check_replaceable(output: Path, *side: Path, overwrite: bool) -> None:
    """Raises InputError if the output or a side file exists, unless Stillroom wrote its content.

    Empty files may be replaced.
    """
    if overwrite:
        return
    records = recorded_files(output)
    has_no_side_records = len(records) == 1  # older versions recorded no side files
    for path in (output, *side):
        if path.exists() and path.stat().st_size:
            is_own_file = (has_no_side_records and path != output) or any(
                matches_record(path, r) for r in records
            )
            if not is_own_file:
                raise foreign_file_error(path)


def check_replaceable_by_size(output: Path, *, overwrite: bool) -> None:
    """Checks by size whether an output may be replaced, without reading it.

    Raises OutputHeldError if it is being written, and InputError if no manifest records a file of
    its size.
    """
    check_unlocked(output)
    size = output.stat().st_size if output.is_file() else 0
    if size and not overwrite and size not in {r.num_bytes for r in recorded_files(output)}:
        raise foreign_file_error(output)


def check_page(path: Path, *, overwrite: bool) -> None:
    """Raises InputError if the file exists, unless it is an unchanged page of Stillroom."""
    if overwrite or not path.exists() or not path.stat().st_size:
        return
    page = path.read_bytes()
    mark = _PAGE_MARK.search(page)
    is_own_page = (
        hashlib.sha256(page[: mark.start()]).hexdigest().encode() == mark[1]
        if mark
        else _OLD_PAGE_MARK.search(page)
    )
    if not is_own_page:
        raise foreign_file_error(path)


def marked_page(html: str) -> bytes:
    """Returns a page as bytes with its hash in the last line; invalid Unicode is replaced."""
    page = html.encode("utf-8", errors="replace")
    return page + f"<!-- stillroom {hashlib.sha256(page).hexdigest()} -->\n".encode()


def foreign_file_error(path: Path) -> InputError:
    """Returns the error for an existing file that Stillroom did not write."""
    return InputError(
        f"{path} exists, but stillroom did not write it, or somebody has changed it since",
        "choose another output, or set overwrite: true (--overwrite) to replace it",
    )


@contextmanager
def output_lock(output: Path, operation: str, *, run_id: str | None = None) -> Generator[None]:
    """Locks an output until the block ends. Raises OutputHeldError if it is locked already.

    The system releases the lock when the process ends. The lock file is next to the output, so it
    also works between servers whose workspaces are nested.
    """
    lock = OutputLock(output)
    lock.acquire(operation, run_id=run_id)
    try:
        yield
    finally:
        lock.release()


def check_unlocked(output: Path) -> None:
    """Raises OutputHeldError if the output is being written."""
    lock = OutputLock(output)
    if lock.path.exists():
        lock.acquire("a check")
        lock.release()


class OutputLock:
    """The lock of an output; the lock file names the holder."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.path = output.with_name(f".{output.name}.lock")
        self._handle: int | None = None

    def acquire(self, operation: str, *, run_id: str | None = None) -> None:
        """Acquires the lock. Raises OutputHeldError, which names the holder, if it is locked."""
        tries = 0
        while self._handle is None:
            tries += 1
            handle = open_real(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder may have deleted the file after it was opened here.
                if os.fstat(handle).st_nlink:
                    self._handle = handle
            except BlockingIOError:
                # `check_unlocked` may hold it for a moment.
                if tries < _TRIES:
                    time.sleep(_RETRY_S)
                    continue
                holder = os.pread(handle, _MAX_HOLDER_BYTES, 0).decode("utf-8", errors="replace")
                raise OutputHeldError(
                    f"{self._output} is being written by {holder or 'another process'}",
                    "wait until it has finished (`stillroom list-runs`), or choose another output",
                ) from None
            finally:
                if self._handle is None:
                    os.close(handle)
        run = f", run {run_id}" if run_id else ""
        holder = f"{operation} (process {os.getpid()}, since {now()}{run})"
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, holder.encode(), 0)

    def release(self) -> None:
        """Releases the lock if it is held, and deletes the lock file."""
        if self._handle is not None:
            with real_folder(self.path.parent) as folder:
                folder.remove(self.path.name)
            os.close(self._handle)
            self._handle = None

"""Finds the current path of a recorded file or model, and the manifest of its recorded content."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stillroom.files import file_sha256
from stillroom.lineage import FileRecord, Manifest, ModelRecord, read_manifest, record_folder
from stillroom.settings import Workspace
from stillroom.trace.request import State
from stillroom.versions import copy_of, versions_with

MAX_BYTES = 16 << 30
"""The largest number of bytes to hash in one call; files beyond it are `unchecked`."""
_BLOCK = 4 << 20


class Checker:
    """Compares records with the files on disk; each path and hash is compared only once."""

    def __init__(self, *, max_bytes: int) -> None:
        self._bytes_left = max_bytes
        self._states: dict[tuple[Path, str], State] = {}

    def file_state(self, record: FileRecord, path: Path) -> State:
        """Returns the state of a file, or of a model's folder, compared with its record."""
        key = (path, record.sha256)
        if key not in self._states:
            self._states[key] = self._compare(record, path)
        return self._states[key]

    def model_state(self, record: ModelRecord) -> State:
        """Returns the state of a model compared with its record.

        The state is `unchecked` if the record has no hash, e.g. for hub models and endpoints.
        """
        folder = Path(record.location)
        if record.sha256 is None:
            return State.UNCHECKED
        files = [folder] if folder.is_file() else folder.rglob("*")
        size = sum(p.stat().st_size for p in files if p.is_file())
        return self.file_state(
            FileRecord(path=record.location, sha256=record.sha256, num_bytes=size), folder
        )

    def _compare(self, record: FileRecord, path: Path) -> State:
        if not path.exists():
            return State.MISSING
        if record.num_bytes > self._bytes_left:
            return State.UNCHECKED
        if path.is_dir():
            self._bytes_left -= record.num_bytes
            is_same = record_folder(path).sha256 == record.sha256
            return State.SAME if is_same else State.CHANGED
        size = path.stat().st_size
        if size < record.num_bytes:
            return State.CHANGED
        self._bytes_left -= record.num_bytes
        if size == record.num_bytes:
            return State.SAME if file_sha256(path) == record.sha256 else State.CHANGED
        is_grown = _prefix_sha256(path, record.num_bytes) == record.sha256
        return State.GROWN if is_grown and record.num_bytes else State.CHANGED


def _prefix_sha256(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while num_bytes and (block := stream.read(min(_BLOCK, num_bytes))):
            digest.update(block)
            num_bytes -= len(block)
    return digest.hexdigest()


APPENDING_OPERATION = "generate_rollouts"
"""The operation that appends rows to an existing output."""
_OTHER_CONTENT_NOTE = "its manifest describes other content, so its origin is unknown"


@dataclass(frozen=True, slots=True)
class Move:
    """The folder of a project when a manifest was written, and its folder now."""

    before: Path
    now: Path

    def resolve(self, recorded: str) -> Path:
        """Returns the current path of a file with a recorded path.

        A path inside the project that does not exist any more is resolved in the project's current
        folder.
        """
        path = Path(recorded)
        if path.exists() or self.before == self.now or not path.is_relative_to(self.before):
            return path
        return self.now / path.relative_to(self.before)


@dataclass(frozen=True, slots=True)
class Origin:
    """The recorded content of a file or model: its current path, its state, and its manifest."""

    record: FileRecord
    path: Path
    state: State
    manifest: Manifest | None
    note: str | None = None
    role: str | None = None
    """The role of a model, such as student or teacher; None for a file."""
    shown: str | None = None
    """The name by which a model was requested; None for a file."""

    @property
    def move(self) -> Move:
        """The move of the project after the manifest was written."""
        if self.manifest is None:
            return Move(Path("/"), Path("/"))
        return move_between(Path(self.manifest.output.path), self.path)

    def with_readable_path(self, origins: "Origins") -> "Origin":
        """Returns this origin with a path at which its recorded rows can be read.

        If the file has changed or is missing, this is the path of a tagged copy, if there is one.
        """
        if self.state not in (State.CHANGED, State.MISSING):
            return self
        copy = origins.tagged_copy(self.record.sha256)
        return self if copy is None else replace(self, path=copy, state=State.SAME)

    def inputs(self, origins: "Origins") -> list["Origin"]:
        """Returns the origins of the files and models from which this content was made."""
        if self.manifest is None:
            return []
        files = [origins.of_file(r, self.move.resolve(r.path)) for r in self.manifest.inputs]
        return files + [origins.of_model(model) for model in self.manifest.models]


class Origins:
    """Looks up the origins of recorded files and models in a workspace."""

    def __init__(self, workspace: Workspace, checker: Checker) -> None:
        self._workspace, self._checker = workspace, checker

    def of_file(self, record: FileRecord, path: Path) -> Origin:
        """Returns the origin of recorded content that should be at `path`.

        Its manifest is the one next to the file if that describes this content, or the file after
        rows were appended; otherwise the manifest of a tagged version.
        """
        state = self._checker.file_state(record, path)
        manifest = read_manifest(path)
        if manifest is not None and manifest.output.sha256 == record.sha256:
            return Origin(record, path, state, manifest)
        if (
            manifest is not None
            and state is State.GROWN
            and manifest.operation == APPENDING_OPERATION
        ):
            return Origin(record, path, state, manifest, "rows were appended after it was used")
        for version in versions_with(self._workspace.root, record.sha256):
            if version.manifest is not None:
                version_manifest = msgspec.convert(version.manifest, Manifest)
                return Origin(record, path, state, version_manifest, f"tagged as {version.name}")
        return Origin(
            record, path, state, None, _OTHER_CONTENT_NOTE if manifest is not None else None
        )

    def tagged_copy(self, sha256: str) -> Path | None:
        """Returns the path of a tagged version with this content; None if there is none."""
        for version in versions_with(self._workspace.root, sha256):
            path = copy_of(self._workspace.root, version)
            record = FileRecord(path=str(path), sha256=sha256, num_bytes=version.num_bytes)
            if self._checker.file_state(record, path) is State.SAME:
                return path
        return None

    def of_model(self, record: ModelRecord) -> Origin:
        """Returns the origin of a model, with the manifest of its folder if the weights match."""
        state = self._checker.model_state(record)
        folder = Path(record.location)
        if record.sha256 is None:
            note = f"hub commit {record.revision}" if record.revision else None
            if note is None and record.location != record.name:
                note = f"served by {record.location}"
            if models := [answering.model for answering in record.answered_by]:
                answered = f"answered by {', '.join(models)}"
                note = answered if note is None else f"{note}, {answered}"
            content = FileRecord(path=record.name, sha256="", num_bytes=0)
            return Origin(content, folder, state, None, note, record.role, record.name)
        content = FileRecord(path=record.location, sha256=record.sha256, num_bytes=0)
        manifest = read_manifest(folder) if folder.is_dir() else None
        if manifest is not None and manifest.output.sha256 != record.sha256:
            return Origin(
                content, folder, state, None, _OTHER_CONTENT_NOTE, record.role, record.name
            )
        return Origin(content, folder, state, manifest, None, record.role, record.name)


def move_between(before: Path, now: Path) -> Move:
    """Returns the move of a project in which one file moved from `before` to `now`.

    The common suffix of the two paths counts as the path within the project.
    """
    old, new = before.parts, now.parts
    shared = 0
    while shared < min(len(old), len(new)) and old[-1 - shared] == new[-1 - shared]:
        shared += 1
    if not shared:
        return Move(before, before)
    return Move(Path(*old[: len(old) - shared] or "/"), Path(*new[: len(new) - shared] or "/"))

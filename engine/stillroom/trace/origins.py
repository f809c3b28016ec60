"""Finds where a recorded file or model is now, and the manifest of exactly that content."""

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
"""The most bytes to hash in one call, nearest files first; the rest is `unchecked`."""
_BLOCK = 4 << 20


class Checker:
    """Compares records with what is on disk now; each path and hash is compared only once."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._left = max_bytes
        self._known: dict[tuple[Path, str], State] = {}

    def file(self, record: FileRecord, path: Path) -> State:
        """Returns the state of a file, or of a model's folder, compared with its record."""
        key = (path, record.sha256)
        if key not in self._known:
            self._known[key] = self._compared(record, path)
        return self._known[key]

    def model(self, record: ModelRecord) -> State:
        """Returns the state of a model compared with its record.

        It is unchecked if the record has no hash, as for models on the hub or behind an endpoint.
        """
        folder = Path(record.location)
        if record.sha256 is None:
            return State.UNCHECKED
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        return self.file(
            FileRecord(path=record.location, sha256=record.sha256, num_bytes=size), folder
        )

    def _compared(self, record: FileRecord, path: Path) -> State:
        if not path.exists():
            return State.MISSING
        if record.num_bytes > self._left:
            return State.UNCHECKED
        if path.is_dir():
            self._left -= record.num_bytes
            is_same = record_folder(path).sha256 == record.sha256
            return State.SAME if is_same else State.CHANGED
        size = path.stat().st_size
        if size < record.num_bytes:
            return State.CHANGED
        self._left -= record.num_bytes
        if size == record.num_bytes:
            return State.SAME if file_sha256(path) == record.sha256 else State.CHANGED
        is_grown = _beginning_sha256(path, record.num_bytes) == record.sha256
        return State.GROWN if is_grown and record.num_bytes else State.CHANGED


def _beginning_sha256(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while num_bytes and (block := stream.read(min(_BLOCK, num_bytes))):
            digest.update(block)
            num_bytes -= len(block)
    return digest.hexdigest()


APPENDING = "generate_rollouts"
_OTHER_CONTENT = "its manifest is of other content; how this one was made is not on record"


@dataclass(frozen=True, slots=True)
class Move:
    """The folder of a project when a manifest was written, and its folder now."""

    before: Path
    now: Path

    def place(self, recorded: str) -> Path:
        """Returns where a recorded path is now.

        If nothing exists at that path, and it was inside the project, it is looked for where the
        project is now.
        """
        path = Path(recorded)
        if path.exists() or self.before == self.now or not path.is_relative_to(self.before):
            return path
        return self.now / path.relative_to(self.before)


@dataclass(frozen=True, slots=True)
class Origin:
    """A recorded content: its present place, its state, and the manifest of how it was made."""

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
        """The move of the project since the manifest was written."""
        if self.manifest is None:
            return Move(Path("/"), Path("/"))
        return move_between(Path(self.manifest.output.path), self.path)

    def rows(self, origins: "Origins") -> "Origin":
        """Returns this origin with the path where its recorded rows can be read.

        If the file has changed or is missing, that is the copy that a tagged version keeps, if any.
        """
        if self.state not in (State.CHANGED, State.MISSING):
            return self
        kept = origins.kept_copy(self.record.sha256)
        return self if kept is None else replace(self, path=kept, state=State.SAME)

    def inputs(self, origins: "Origins") -> list["Origin"]:
        """Returns the origins of the files and models that this content was made from."""
        if self.manifest is None:
            return []
        files = [origins.of_file(r, self.move.place(r.path)) for r in self.manifest.inputs]
        return files + [origins.of_model(model) for model in self.manifest.models]


class Origins:
    """Looks up the origins of recorded files and models in a workspace."""

    def __init__(self, workspace: Workspace, checker: Checker) -> None:
        self._workspace, self._checker = workspace, checker

    def of_file(self, record: FileRecord, path: Path) -> Origin:
        """Returns the origin of a recorded content that is looked for at `path`.

        Its manifest is the one next to the path if that is about this content or, for an appending
        operation, about the file as it has grown; otherwise the one that a tagged version keeps.
        """
        state = self._checker.file(record, path)
        there = read_manifest(path)
        if there is not None and there.output.sha256 == record.sha256:
            return Origin(record, path, state, there)
        if there is not None and state is State.GROWN and there.operation == APPENDING:
            return Origin(record, path, state, there, "rows were appended after those used")
        for version in versions_with(self._workspace.root, record.sha256):
            if version.manifest is not None:
                kept = msgspec.convert(version.manifest, Manifest)
                return Origin(record, path, state, kept, f"kept as {version.name}")
        return Origin(record, path, state, None, _OTHER_CONTENT if there is not None else None)

    def kept_copy(self, sha256: str) -> Path | None:
        """Returns the path of a tagged version's copy with this content; None if there is none."""
        for version in versions_with(self._workspace.root, sha256):
            path = copy_of(self._workspace.root, version)
            record = FileRecord(path=str(path), sha256=sha256, num_bytes=version.num_bytes)
            if self._checker.file(record, path) is State.SAME:
                return path
        return None

    def of_model(self, record: ModelRecord) -> Origin:
        """Returns the origin of a model, with its folder's manifest if that is of these weights."""
        state = self._checker.model(record)
        folder = Path(record.location)
        if record.sha256 is None:
            note = f"hub commit {record.revision}" if record.revision else None
            if note is None and record.location != record.name:
                note = f"served by {record.location}"
            if answered := [answering.model for answering in record.answered_by]:
                models = f"answered by {', '.join(answered)}"
                note = models if note is None else f"{note}, {models}"
            content = FileRecord(path=record.name, sha256="", num_bytes=0)
            return Origin(content, folder, state, None, note, record.role, record.name)
        content = FileRecord(path=record.location, sha256=record.sha256, num_bytes=0)
        there = read_manifest(folder) if folder.is_dir() else None
        if there is not None and there.output.sha256 != record.sha256:
            return Origin(content, folder, state, None, _OTHER_CONTENT, record.role, record.name)
        return Origin(content, folder, state, there, None, record.role, record.name)


def move_between(before: Path, now: Path) -> Move:
    """Returns the move of a project in which one file moved from `before` to `now`.

    The common end of the two paths is taken as the path within the project.
    """
    old, new = before.parts, now.parts
    shared = 0
    while shared < min(len(old), len(new)) and old[-1 - shared] == new[-1 - shared]:
        shared += 1
    if not shared:
        return Move(before, before)
    return Move(Path(*old[: len(old) - shared] or "/"), Path(*new[: len(new) - shared] or "/"))

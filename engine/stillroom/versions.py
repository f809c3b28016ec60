"""Versions of data files, named by content (`train@1a2b3c4d`) or by tag (`train@v1.0`).

Tagging a file copies it to `.stillroom/datasets/`, under the hash of its content. It is a copy and
not a link, since runs append to files and users edit files in place.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import InputError
from stillroom.files import file_sha256, read_json, replacing, write_new

MIN_DIGITS = 8
"""The minimum number of SHA-256 hex digits that identify a version."""
FOLDER = ".stillroom"
_BLOCK = 1 << 20
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONTENT = re.compile(rf"[0-9a-f]{{{MIN_DIGITS},64}}")
_ENDINGS = ("", ".jsonl", ".json", ".txt")


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A tagged version of a file; the content of a tag never changes."""

    file: str
    """The path of the file, relative to the workspace."""
    tag: str
    sha256: str
    num_bytes: int
    copy: str
    """The file name of the copy: the hash of the content with the suffix of the file."""
    created_at: str
    manifest: dict[str, Any] | None
    """The manifest of the file when it was tagged; None if it had none."""

    @property
    def name(self) -> str:
        """The name of the version as an input, e.g. `train@v1.0`."""
        return f"{self.file.removesuffix('.jsonl')}@{self.tag}"


def tag_file(
    root: Path, file: Path, tag: str, *, created_at: str, manifest: dict[str, Any] | None
) -> Version:
    """Tags a file, keeping a copy of it, and returns the version.

    Raises InputError if the tag is invalid or already used for other content, or if the file is
    outside the workspace.
    """
    _check_tag(tag)
    relative_path = _relative_path(root, file)
    if relative_path is None:
        raise InputError(
            f"{file} is outside the workspace {root}, so it cannot be tagged",
            "copy it into the workspace first",
        )
    sha256 = file_sha256(file)
    version = Version(
        file=relative_path,
        tag=tag,
        sha256=sha256,
        num_bytes=file.stat().st_size,
        copy=sha256 + file.suffix,
        created_at=created_at,
        manifest=manifest,
    )
    record = _record_path(root, relative_path, tag)
    if not record.exists():
        _store_copy(file, copy_of(root, version), sha256)
        document = msgspec.json.format(msgspec.json.encode(version), indent=2) + b"\n"
        with suppress(FileExistsError):
            write_new(record, document)
    stored = _read_version(record)
    if stored.sha256 != sha256:
        raise InputError(
            f"tag {tag!r} of {relative_path} already names other content (SHA-256 "
            f"{stored.sha256[:12]}…, but the file now has {sha256[:12]}…)",
            "choose another tag, since the content of a tag never changes",
        )
    return stored


def versions_of(root: Path, file: Path) -> list[Version]:
    """Returns the tagged versions of a file, the oldest first."""
    relative_path = _relative_path(root, file)
    if relative_path is None:
        return []
    folder = _record_path(root, relative_path, "").parent
    versions = _records(folder, f"{Path(relative_path).name}@")
    return sorted(versions, key=lambda version: version.created_at)


def versions_with(root: Path, sha256: str) -> list[Version]:
    """Returns the tagged versions of all files whose content has this SHA-256."""
    folder = root / FOLDER / "tags"
    return [v for v in _records(folder, "", is_deep=True) if v.sha256 == sha256]


def copy_of(root: Path, version: Version) -> Path:
    """Returns the path of the copy of a version."""
    return root / FOLDER / "datasets" / version.copy


def record_of(root: Path, version: Version) -> Path:
    """Returns the path of the file that records a version."""
    return _record_path(root, version.file, version.tag)


def find_version(root: Path, name: str | Path) -> Path | None:
    """Returns a file with the content of `name@hash` or `name@tag`; None for other names.

    That is the named file itself while it has the content, otherwise the stored copy. Raises
    InputError if neither has it.
    """
    base, separator, tag_or_hash = str(name).rpartition("@")
    if not separator or not base or "/" in tag_or_hash or not _TAG.fullmatch(tag_or_hash):
        return None
    files = [root / (base + ending) for ending in _ENDINGS]
    if _CONTENT.fullmatch(tag_or_hash):
        return _find_by_content(root, files, base, tag_or_hash)
    tagged = [v for file in files for v in versions_of(root, file) if v.tag == tag_or_hash]
    if not tagged:
        raise InputError(f"there is no version {str(name)!r}", _known_versions(root, files, base))
    if (path := _file_with_content(root, tagged[0])) is not None:
        return path
    raise InputError(
        f"the copy of {tagged[0].name} ({copy_of(root, tagged[0])}) is damaged or missing",
        f"restore it (SHA-256 {tagged[0].sha256[:12]}…) from a backup, or create the file again",
    )


def _find_by_content(root: Path, files: list[Path], base: str, prefix: str) -> Path:
    """Returns a file, or a tagged copy of it, whose SHA-256 begins with `prefix`.

    Raises InputError if there is none, or tagged versions with different hashes match.
    """
    present = [file for file in files if file.is_file()]
    for file in present:
        if file_sha256(file).startswith(prefix):
            return file
    matches = [v for file in files for v in versions_of(root, file) if v.sha256.startswith(prefix)]
    if len({version.sha256 for version in matches}) > 1:
        raise InputError(
            f"{base}@{prefix} matches several versions", "give more digits of the hash"
        )
    for version in matches:
        if (path := _file_with_content(root, version)) is not None:
            return path
    problem = f"{present[0]} has other content" if present else f"there is no file {base}"
    raise InputError(
        f"{base}@{prefix} was not found: {problem}, and no intact tagged copy has the hash "
        f"{prefix}",
        _known_versions(root, files, base),
    )


def _file_with_content(root: Path, version: Version) -> Path | None:
    """Returns the file or the copy that has exactly the version's content; None if neither has."""
    for path in (root / version.file, copy_of(root, version)):
        has_size = path.is_file() and path.stat().st_size == version.num_bytes
        if has_size and file_sha256(path) == version.sha256:
            return path
    return None


def _known_versions(root: Path, files: list[Path], base: str) -> str:
    """Returns the text of a fix that lists the existing versions of a file."""
    names = [
        f"{base}@{file_sha256(f)[:MIN_DIGITS]} (current content)" for f in files if f.is_file()
    ]
    names += [f"{v.name} ({v.sha256[:MIN_DIGITS]})" for f in files for v in versions_of(root, f)]
    if not names:
        return "check the name; to keep a version of a file, call show_lineage with tag"
    return "give one of: " + ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def _check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag):
        raise InputError(
            f"tag {tag[:80]!r} is not allowed",
            "use letters, digits, dots, dashes and underscores, e.g. v1.0",
        )
    if _CONTENT.fullmatch(tag):
        raise InputError(f"tag {tag!r} looks like a hash", "choose another tag, e.g. v1.0")


def _relative_path(root: Path, file: Path) -> str | None:
    try:
        return str(file.resolve().relative_to(root.resolve()))
    except ValueError:
        return None


def _record_path(root: Path, relative_path: str, tag: str) -> Path:
    return root / FOLDER / "tags" / f"{relative_path}@{tag}.json"


def _records(folder: Path, prefix: str, *, is_deep: bool = False) -> Iterator[Version]:
    """Yields the versions recorded in a folder and, if `is_deep`, in its subfolders."""
    paths = folder.rglob("*@*.json") if is_deep else folder.glob("*@*.json")
    for path in sorted(paths):
        if path.name.startswith(prefix) and not path.name.startswith("."):
            version = _read_version(path)
            # File names may contain @ too: `a@b.jsonl@v1.json` is not a record of the file `a`.
            if is_deep or path.name == f"{Path(version.file).name}@{version.tag}.json":
                yield version


def _read_version(record: Path) -> Version:
    return read_json(record, Version)


def _store_copy(file: Path, copy: Path, sha256: str) -> None:
    """Copies a file unless an intact copy exists. Raises InputError if the file changes."""
    if copy.is_file() and file_sha256(copy) == sha256:
        return
    digest = hashlib.sha256()
    with (
        replacing(copy) as handle,
        os.fdopen(handle, "wb") as stream,
        file.open("rb") as source,
    ):
        while block := source.read(_BLOCK):
            digest.update(block)
            stream.write(block)
        if digest.hexdigest() != sha256:
            raise InputError(
                f"{file} changed while it was being copied",
                "repeat the call once no program is writing to it",
            )
        stream.flush()
        os.fsync(handle)
        os.fchmod(handle, 0o444)

"""Copies the skills to the folder where an agent host looks for them; hosts may share a folder."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.files import read_json, write_atomic, write_json
from stillroom_mcp.http.listening import default_token_file
from stillroom_mcp.resources.texts import skill_texts


class _SkillRecord(msgspec.Struct, frozen=True):
    """The skill files that setup wrote to a folder, and the hosts that use them."""

    path: str
    files: dict[str, str]
    """The SHA-256 of each file as setup wrote it, by its path in the folder."""
    hosts: list[str]


@dataclass(frozen=True, slots=True)
class SkillFolder:
    """The skills folder of one host."""

    path: Path
    host: str

    def outdated_files(self) -> dict[str, bytes]:
        """Returns the files that are missing or old, except files that somebody else changed."""
        recorded = self._record().files
        current = {f"{text.skill}/{text.file}": text.path.read_bytes() for text in skill_texts()}
        return {
            name: data
            for name, data in current.items()
            if (sha256 := _sha256_of(self.path / name)) != hashlib.sha256(data).hexdigest()
            and sha256 in (None, recorded.get(name))
        }

    @property
    def is_recorded(self) -> bool:
        """Whether setup wrote the skills for this host."""
        return self.host in self._record().hosts

    def write(self, files: dict[str, bytes]) -> None:
        """Records the files, so that `remove` finds them, and writes them."""
        record = self._record()
        written = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        hosts = sorted({*record.hosts, self.host})
        record = _SkillRecord(str(self.path), {**record.files, **written}, hosts)
        self._record_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self._record_path, record)
        for name, data in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / name, data)

    def remove(self) -> None:
        """Removes the written files unless another host uses them.

        Files that somebody has changed since are kept.
        """
        record = self._record()
        other_hosts = [host for host in record.hosts if host != self.host]
        if other_hosts:
            write_json(self._record_path, msgspec.structs.replace(record, hosts=other_hosts))
            return
        removed = [
            self.path / name
            for name, sha256 in record.files.items()
            if _sha256_of(self.path / name) == sha256
        ]
        for path in removed:
            path.unlink()
        folders = {folder for path in removed for folder in path.parents}
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            if folder.is_relative_to(self.path.parent):
                # A folder that has other files is kept.
                with suppress(OSError):
                    folder.rmdir()
        self._record_path.unlink(missing_ok=True)

    @property
    def _record_path(self) -> Path:
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        return default_token_file().parent / "setup" / f"skills-{name}.json"

    def _record(self) -> _SkillRecord:
        if not self._record_path.exists():
            return _SkillRecord(str(self.path), {}, [])
        return read_json(self._record_path, _SkillRecord, fix="delete it, and the skills by hand")


def _sha256_of(path: Path) -> str | None:
    """Returns the hash of a file's content; None if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

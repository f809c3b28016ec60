"""`stillroom setup`: shows what will change in a host's file, changes it, and takes it back."""

import argparse
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import msgspec

from stillroom import bounds
from stillroom.errors import InputError
from stillroom.files import read_json, replacing, write_json
from stillroom.settings import open_workspace
from stillroom_mcp.host_setup.hosts import HOSTS, SERVE, SERVER_NAME, Host
from stillroom_mcp.host_setup.skills import SkillFolder
from stillroom_mcp.http.listening import default_token_file

_LARGEST = bounds.HOST_CONFIG.most


class _Edit(msgspec.Struct, frozen=True):
    """One change of a text: the old and the new text at a position."""

    at: int
    removed: str
    inserted: str


class _Record(msgspec.Struct, frozen=True):
    """What setup did to a file, from which `--undo` takes it back."""

    path: str
    is_new: bool
    """Whether setup made the file."""
    new_folders: list[str]
    edits: list[_Edit]
    sha256: str
    """Of the file's bytes as setup left them."""
    entry: dict[str, Any] | None = None
    """The entry that setup added; None if there was one before."""


@dataclass(frozen=True, slots=True)
class _File:
    """A host's file as it was read; `text` is None where there is none."""

    path: Path
    text: str | None

    @property
    def record_path(self) -> Path:
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        return default_token_file().parent / "setup" / f"{name}.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    names = ", ".join(f"{host.name} ({host.title})" for host in HOSTS)
    parser.add_argument(
        "host", choices=[host.name for host in HOSTS], metavar="HOST", help=f"one of {names}"
    )
    parser.add_argument("--workspace", help="folder that holds the project (default: this folder)")
    parser.add_argument(
        "--user", action="store_true", help="your own file for all projects, not the project's"
    )
    parser.add_argument(
        "--print", action="store_true", help="only print the file's text and place; change nothing"
    )
    parser.add_argument("--no-skills", action="store_true", help="only the server")
    parser.add_argument("--undo", action="store_true", help="take back what setup did to the file")
    parser.add_argument(
        "--yes", action="store_true", help="write without asking; needed where nobody can answer"
    )


def run(options: argparse.Namespace) -> int:
    """Carries out the command as it was given, and returns the exit code."""
    host = next(host for host in HOSTS if host.name == options.host)
    project = open_workspace(options.workspace).root
    path = _place(host, project, is_user=options.user)
    if options.print:
        _say(f"# {path}\n{host.snippet(start_command())}".rstrip())
        return 0
    is_agreed = _agreement(is_given=options.yes)
    file = _read(path)
    skills = None
    if host.skills_folder is not None and not options.no_skills:
        root = Path.home() if options.user else project
        skills = SkillFolder((root / host.skills_folder).resolve(), host.name)
    if options.undo:
        return _undo(host, file, skills, is_agreed)
    return _set_up(host, file, skills, is_agreed)


def start_command() -> Sequence[str]:
    """Returns the command that starts this installation's server from anywhere."""
    # `uvx` runs from a cache that it may clear at any time.
    if {"archive-v0", "environments-v2"} & set(Path(sys.prefix).parts):
        return ("uvx", *SERVE)
    script = Path(sys.prefix, "bin", SERVE[0])
    found = which(SERVE[0])
    if found and Path(found).resolve() == script.resolve():
        return SERVE
    if script.exists():
        return (str(script), *SERVE[1:])
    return (sys.executable, "-m", "stillroom_mcp", *SERVE[1:])


def _place(host: Host, project: Path, *, is_user: bool) -> Path:
    if is_user and host.user_file is None:
        raise InputError(
            f"{host.title} keeps its own state in the file for all projects, and rewrites it while "
            "it runs",
            f"let it do so: `claude mcp add --scope user {SERVER_NAME} -- {' '.join(SERVE)}`, or "
            "leave out --user to write the project's .mcp.json",
        )
    if is_user and host.user_file is not None:
        path = host.user_file()
    else:
        names = (host.project_file, *host.other_project_files)
        path = next((project / n for n in names if (project / n).exists()), project / names[0])
    # Files of one's own are often links into a folder under version control; the file itself is
    # changed, not the link.
    return path.resolve()


def _read(path: Path) -> _File:
    try:
        if path.exists() and not path.is_file():
            raise InputError(
                f"{path} is no regular file", "put a file there; nothing was read or changed"
            )
        with path.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise InputError(
                f"{path} is longer than {_LARGEST >> 20} MB",
                "see what it holds; add what `--print` shows by hand",
            )
        return _File(path, data.decode())
    except FileNotFoundError:
        return _File(path, None)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}",
            "save it as UTF-8, then call again; nothing was changed",
        ) from error


def _set_up(
    host: Host, file: _File, skills: SkillFolder | None, is_agreed: Callable[[], bool]
) -> int:
    before = file.text or ""
    try:
        after = host.with_entry(before, start_command())
    except ValueError as error:
        raise InputError(
            f"{file.path}: {error}",
            f"mend it, or add by hand what `stillroom setup {host.name} --print` shows; nothing "
            "was changed",
        ) from error
    new_skills = skills.outdated() if skills else {}
    if after == before and not new_skills:
        _say(f"{file.path} has the entry already; nothing to do\nnext: {host.afterwards}")
        return 0
    edit = _difference(before, after)
    if after != before:
        _show(file.path, edit, is_new=file.text is None)
    if skills and new_skills:
        names = sorted({name.partition("/")[0] for name in new_skills})
        _say(f"{skills.path}: the skills {', '.join(names)}")
    if not is_agreed():
        return 1
    if skills and new_skills:
        skills.write(new_skills)
    if after != before:
        _enter(host, file, after, edit)
    _say(f"written: {file.path}\nnext: {host.afterwards}")
    _say("to take it back: the same command with --undo")
    return 0


def _enter(host: Host, file: _File, after: str, edit: _Edit) -> None:
    """Writes the host's file with the entry, and before it how that is taken back."""
    new_folders = [str(p) for p in (file.path.parent, *file.path.parent.parents) if not p.exists()]
    earlier = _record(file)
    record = _Record(
        path=str(file.path),
        is_new=earlier.is_new if earlier else file.text is None,
        new_folders=earlier.new_folders if earlier else new_folders,
        edits=[*(earlier.edits if earlier else ()), edit],
        sha256=_sha256(after),
        entry=None if host.entry_in(file.text or "") is not None else host.entry_in(after),
    )
    file.path.parent.mkdir(parents=True, exist_ok=True)
    # Kept before the file is changed, so that there is no change that cannot be taken back.
    file.record_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(file.record_path, record)
    _write(file, after)


def _undo(
    host: Host, file: _File, skills: SkillFolder | None, is_agreed: Callable[[], bool]
) -> int:
    record = _record(file)
    has_skills = skills is not None and skills.is_recorded
    if record is None and not has_skills:
        raise InputError(
            f"setup has changed nothing in {file.path}",
            f"if an entry {SERVER_NAME!r} is there, delete it by hand; --user and --workspace say "
            "which file is meant",
        )
    before = None
    if record is not None and file.text is not None:
        before = _taken_back(host, file.text, record)
        if before is None:
            raise InputError(
                f"the entry of {SERVER_NAME} in {file.path} was changed since",
                f"delete the entry {SERVER_NAME!r} in it by hand; nothing was changed",
            )
        _show(file.path, _difference(file.text, before), is_new=False)
    if skills and has_skills:
        _say(f"- the skills in {skills.path} that setup wrote")
    if not is_agreed():
        return 1
    if skills and has_skills:
        skills.remove()
    if record is None:
        return 0
    if before is None:
        file.record_path.unlink()
        _say(f"{file.path} is gone already")
        return 0
    _take_back(file, record, before)
    return 0


def _take_back(file: _File, record: _Record, before: str) -> None:
    """Writes the file as it was before setup, or deletes it if it holds nothing else."""
    is_removed = record.is_new and not before
    if is_removed:
        _check_unchanged(file)
        file.path.unlink()
        for folder in record.new_folders:
            # One that holds other files by now stays.
            with suppress(OSError):
                Path(folder).rmdir()
    else:
        _write(file, before)
    file.record_path.unlink()
    _say(f"{'removed' if is_removed else 'restored'}: {file.path}")


def _taken_back(host: Host, text: str, record: _Record) -> str | None:
    """Returns the text without setup's changes; None if its entry was changed since.

    All else that was changed in the file since is kept.
    """
    if _sha256(text) == record.sha256:
        for edit in reversed(record.edits):
            end = edit.at + len(edit.inserted)
            text = text[: edit.at] + edit.removed + text[end:]
        return text
    try:
        if record.entry is not None and host.entry_in(text) == record.entry:
            return host.without_entry(text)
        for edit in reversed(record.edits):
            if not edit.inserted or edit.inserted not in text:
                return None
            text = text.replace(edit.inserted, edit.removed, 1)
        host.entry_in(text)
    except ValueError:
        return None
    return text


def _record(file: _File) -> _Record | None:
    if not file.record_path.exists():
        return None
    return read_json(file.record_path, _Record, fix="delete it, and the entry in the host's file")


def _difference(before: str, after: str) -> _Edit:
    """Returns the one stretch in which two texts differ."""
    start = _num_equal(before, after)
    most = min(len(before), len(after)) - start
    end = min(most, _num_equal(before[::-1], after[::-1]))
    return _Edit(start, before[start : len(before) - end], after[start : len(after) - end])


def _num_equal(one: str, other: str) -> int:
    """Returns how many characters at the beginning of two texts are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _show(path: Path, edit: _Edit, *, is_new: bool) -> None:
    """Prints a change without the lines around it, which may hold keys of other servers."""
    _say(f"{path}{' (new)' if is_new else ''}")
    for sign, text in (("-", edit.removed), ("+", edit.inserted)):
        for line in text.splitlines():
            if line.strip():
                _say(f"{sign} {line}")


def _agreement(*, is_given: bool) -> Callable[[], bool]:
    """Returns a function that says whether a change that was shown may be made."""

    def is_agreed() -> bool:
        if is_given:
            return True
        if not sys.stdin.isatty():
            _say("nothing was changed; add --yes to write it")
            return False
        sys.stdout.write("write it? [y/N] ")
        sys.stdout.flush()
        is_yes = sys.stdin.readline().strip().lower() in ("y", "yes")
        if not is_yes:
            _say("nothing was changed")
        return is_yes

    return is_agreed


def _write(file: _File, text: str) -> None:
    """Replaces the file at once, with the rights that it had."""
    _check_unchanged(file)
    with replacing(file.path) as handle, os.fdopen(handle, "wb") as stream:
        if file.text is not None:
            os.fchmod(handle, stat.S_IMODE(file.path.stat().st_mode))
        stream.write(text.encode())
        stream.flush()
        os.fsync(handle)


def _check_unchanged(file: _File) -> None:
    if _read(file.path) != file:
        raise InputError(
            f"{file.path} was changed by another program in the meantime",
            "call again, which shows the difference anew; nothing was changed",
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")

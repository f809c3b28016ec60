"""`stillroom setup`: shows the changes to a host's config file, writes them, and can undo them."""

import argparse
import hashlib
import os
import re
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

_MAX_CONFIG_BYTES = bounds.HOST_CONFIG.limit


class _Edit(msgspec.Struct, frozen=True):
    """One edit of a text: the removed and the inserted text at a position."""

    at: int
    removed: str
    inserted: str


class _SetupRecord(msgspec.Struct, frozen=True):
    """The changes that setup made to a file, from which `--undo` restores it."""

    path: str
    is_new: bool
    """Whether setup created the file."""
    new_folders: list[str]
    edits: list[_Edit]
    sha256: str
    """The hash of the file as setup wrote it."""
    entry: dict[str, Any] | None = None
    """The entry that setup added; None if the file already had an entry."""


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """A host's config file as it was read; `text` is None if the file does not exist."""

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
    parser.add_argument("--workspace", help="the project's folder (default: this folder)")
    parser.add_argument(
        "--user", action="store_true", help="change your config for all projects, not the project's"
    )
    parser.add_argument(
        "--print", action="store_true", help="only print the file's path and text; change nothing"
    )
    parser.add_argument("--no-skills", action="store_true", help="add only the server")
    parser.add_argument("--undo", action="store_true", help="undo what setup changed")
    parser.add_argument(
        "--yes", action="store_true", help="write without asking; required without a terminal"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    host = next(host for host in HOSTS if host.name == options.host)
    project = open_workspace(options.workspace).root
    path = _config_path(host, project, is_user=options.user)
    if options.print:
        _print(f"# {path}\n{host.snippet(start_command())}".rstrip())
        return 0
    ask = _confirmation(is_yes_given=options.yes)
    file = _read(path)
    skills = None
    if host.skills_folder is not None and not options.no_skills:
        root = Path.home() if options.user else project
        skills = SkillFolder((root / host.skills_folder).resolve(), host.name)
    if options.undo:
        return _undo(host, file, skills, ask)
    return _apply(host, file, skills, ask)


def start_command() -> Sequence[str]:
    """Returns the command that starts this installation's server from anywhere."""
    # `uvx` runs from a cache that it may clear at any time.
    if {"archive-v0", "environments-v2"} & set(Path(sys.prefix).parts):
        return ("uvx", *SERVE)
    script = Path(sys.prefix, "bin", SERVE[0])
    on_path = which(SERVE[0])
    if on_path and Path(on_path).resolve() == script.resolve():
        return SERVE
    if script.exists():
        return (str(script), *SERVE[1:])
    return (sys.executable, "-m", "stillroom_mcp", *SERVE[1:])


def _config_path(host: Host, project: Path, *, is_user: bool) -> Path:
    if is_user and host.user_file is None:
        raise InputError(
            f"setup does not edit {host.title}'s config for all projects, because {host.title} "
            "rewrites that file while it runs",
            f"let it add the server: `claude mcp add --scope user {SERVER_NAME} -- "
            f"{' '.join(SERVE)}`, or leave out --user to write the project's .mcp.json",
        )
    if is_user and host.user_file is not None:
        path = host.user_file()
    else:
        names = (host.project_file, *host.other_project_files)
        path = next((project / n for n in names if (project / n).exists()), project / names[0])
    # Config files are often links into a repository: change the file itself, not the link.
    return path.resolve()


def _read(path: Path) -> _ConfigFile:
    try:
        if path.exists() and not path.is_file():
            raise InputError(
                f"{path} is not a regular file",
                "replace it with a file; nothing was read or changed",
            )
        with path.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES + 1)
        if len(data) > _MAX_CONFIG_BYTES:
            raise InputError(
                f"{path} is longer than {_MAX_CONFIG_BYTES >> 20} MB",
                "check its content, and add the text that `--print` shows by hand",
            )
        return _ConfigFile(path, data.decode())
    except FileNotFoundError:
        return _ConfigFile(path, None)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}",
            "save it as UTF-8, then call again; nothing was changed",
        ) from error


def _apply(
    host: Host, file: _ConfigFile, skills: SkillFolder | None, ask: Callable[[], bool]
) -> int:
    """Adds the entry and the skills once the user agrees; returns the exit code."""
    before = file.text or ""
    try:
        after = host.with_entry(before, start_command())
    except ValueError as error:
        raise InputError(
            f"{file.path}: {error}",
            f"fix the file, or add the text that `stillroom setup {host.name} --print` shows by "
            "hand; nothing was changed",
        ) from error
    new_skills = skills.outdated_files() if skills else {}
    if after == before and not new_skills:
        _print(f"{file.path} already has the entry; nothing to do\nnext: {host.next_step}")
        return 0
    edit = _difference(before, after)
    if after != before:
        _show(file.path, edit, is_new=file.text is None)
    if skills and new_skills:
        names = sorted({name.partition("/")[0] for name in new_skills})
        _print(f"{skills.path}: the skills {', '.join(names)}")
    if not ask():
        return 1
    if skills and new_skills:
        skills.write(new_skills)
    if after != before:
        _write_entry(host, file, after, edit)
    _print(f"written: {file.path}\nnext: {host.next_step}")
    _print("to undo it, run the same command with --undo")
    return 0


def _write_entry(host: Host, file: _ConfigFile, after: str, edit: _Edit) -> None:
    """Writes the record for --undo, then the host's file with the entry."""
    new_folders = [str(p) for p in (file.path.parent, *file.path.parent.parents) if not p.exists()]
    earlier = _read_record(file)
    record = _SetupRecord(
        path=str(file.path),
        is_new=earlier.is_new if earlier else file.text is None,
        new_folders=earlier.new_folders if earlier else new_folders,
        edits=[*(earlier.edits if earlier else ()), edit],
        sha256=_sha256(after),
        entry=None if host.entry_in(file.text or "") is not None else host.entry_in(after),
    )
    file.path.parent.mkdir(parents=True, exist_ok=True)
    # The record is written first, so that every change can be undone.
    file.record_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(file.record_path, record)
    _write(file, after)


def _undo(
    host: Host, file: _ConfigFile, skills: SkillFolder | None, ask: Callable[[], bool]
) -> int:
    """Removes the entry and the skills once the user agrees; returns the exit code."""
    record = _read_record(file)
    has_skills = skills is not None and skills.is_recorded
    if record is None and not has_skills:
        raise InputError(
            f"setup has changed nothing in {file.path}",
            f"if it has an entry {SERVER_NAME!r}, delete the entry by hand; --user and --workspace "
            "choose another file",
        )
    before = None
    if record is not None and file.text is not None:
        before = _text_before_setup(host, file.text, record)
        if before is None:
            raise InputError(
                f"{file.path} was changed after setup wrote it, and setup's change to the entry "
                f"{SERVER_NAME!r} can no longer be identified",
                "--undo left the file as it is; correct or delete the entry by hand",
            )
        _show(file.path, _difference(file.text, before), is_new=False)
    if skills and has_skills:
        _print(f"- the skills in {skills.path} that setup wrote")
    if not ask():
        return 1
    if skills and has_skills:
        skills.remove()
    if record is None:
        return 0
    if before is None:
        file.record_path.unlink()
        _print(f"{file.path} no longer exists")
        return 0
    _restore(file, record, before)
    return 0


def _restore(file: _ConfigFile, record: _SetupRecord, before: str) -> None:
    """Writes the file as it was before setup, or deletes it if nothing else is in it."""
    is_removed = record.is_new and not before
    if is_removed:
        _check_unchanged(file)
        file.path.unlink()
        for folder in record.new_folders:
            # A folder that has other files now is kept.
            with suppress(OSError):
                Path(folder).rmdir()
    else:
        _write(file, before)
    file.record_path.unlink()
    _print(f"{'removed' if is_removed else 'restored'}: {file.path}")


def _text_before_setup(host: Host, text: str, record: _SetupRecord) -> str | None:
    """Returns the text without setup's changes; None if they cannot be found in its entry.

    Other changes to the file are kept.
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
            text = _text_before_edit(host, text, edit)
    except ValueError:
        return None
    return text


def _text_before_edit(host: Host, text: str, edit: _Edit) -> str:
    """Returns the text without an edit, wherever it is now in the entry.

    Raises ValueError unless exactly one place in the text is in the entry and has what the edit
    inserted.
    """
    entry, others = host.entry_in(text), host.others_in(text)
    found = list[str]()
    for place in re.finditer(re.escape(edit.inserted), text) if edit.inserted else ():
        before = text[: place.start()] + edit.removed + text[place.end() :]
        if host.entry_in(before) != entry and host.others_in(before) == others:
            found.append(before)
    if len(found) != 1:
        raise ValueError(f"the edit is in the entry {len(found)} times")
    return found[0]


def _read_record(file: _ConfigFile) -> _SetupRecord | None:
    """Returns the record of setup's changes to a file; None if setup has not changed it."""
    if not file.record_path.exists():
        return None
    return read_json(
        file.record_path, _SetupRecord, fix="delete it, and the entry in the host's file"
    )


def _difference(before: str, after: str) -> _Edit:
    """Returns the edit between the common prefix and the common suffix of two texts."""
    start = _common_prefix_length(before, after)
    max_suffix = min(len(before), len(after)) - start
    end = min(max_suffix, _common_prefix_length(before[::-1], after[::-1]))
    return _Edit(start, before[start : len(before) - end], after[start : len(after) - end])


def _common_prefix_length(first: str, second: str) -> int:
    """Returns the length of the common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _show(path: Path, edit: _Edit, *, is_new: bool) -> None:
    """Prints an edit without context lines, which may contain keys of other servers."""
    _print(f"{path}{' (new)' if is_new else ''}")
    for sign, text in (("-", edit.removed), ("+", edit.inserted)):
        for line in text.splitlines():
            if line.strip():
                _print(f"{sign} {line}")


def _confirmation(*, is_yes_given: bool) -> Callable[[], bool]:
    """Returns a function that asks whether to write the printed changes, and returns the answer."""

    def ask() -> bool:
        if is_yes_given:
            return True
        if not sys.stdin.isatty():
            _print("nothing was changed; add --yes to write the changes")
            return False
        sys.stdout.write("write the changes? [y/N] ")
        sys.stdout.flush()
        is_confirmed = sys.stdin.readline().strip().lower() in ("y", "yes")
        if not is_confirmed:
            _print("nothing was changed")
        return is_confirmed

    return ask


def _write(file: _ConfigFile, text: str) -> None:
    """Replaces the file atomically, keeping its permissions."""
    _check_unchanged(file)
    with replacing(file.path) as handle, os.fdopen(handle, "wb") as stream:
        if file.text is not None:
            os.fchmod(handle, stat.S_IMODE(file.path.stat().st_mode))
        stream.write(text.encode())
        stream.flush()
        os.fsync(handle)


def _check_unchanged(file: _ConfigFile) -> None:
    if _read(file.path) != file:
        raise InputError(
            f"{file.path} was changed by another program in the meantime",
            "run the command again, which shows the new changes; nothing was changed",
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")

"""Checks that an operation may read a file: no devices, no kernel files, no credentials."""

import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import InputError

_SYSTEM_FOLDERS = (Path("/proc"), Path("/sys"))
"""Virtual file systems of the kernel."""
_SECRET_FOLDERS = frozenset(
    {".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".kube", ".password-store", ".ssh"}
)
_SECRET_FILE = re.compile(
    r"""
    \.env(\..*|rc)? | .*\.env
    | .*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|gpg|pgpass)
    | id_(rsa|dsa|ecdsa|ed25519)(?!.*\.pub$).*
    | [._]netrc | \.(pgpass|npmrc|pypirc|git-credentials|htpasswd|my\.cnf|dockercfg|s3cfg|boto)
    | \..*_history
    | token | (.*[-_.])?(credentials?|secrets?|api[-_]?keys?)(\.(json|ya?ml|toml|ini|cfg|conf|txt))?
    | (.*[-_.])?(client[-_]secret|service[-_]account|application_default_credentials).*\.json
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Names that by convention belong to files with keys or passwords."""
_DATA_SUFFIXES = frozenset({".jsonl", ".md", ".py"})
"""Suffixes of data, text and code, which are readable whatever their name."""
_QUOTED = re.compile(r"'[^']{2,}'")
_SPECIAL_FILES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FIX = (
    "give a file of rows, a config or code; to use a part of this file, copy that part to a new one"
)


def check_readable(path: Path) -> None:
    """Raises InputError for a file that no operation may read, without opening it.

    These are pipes, sockets, devices, the kernel's virtual files, and files named like credentials,
    such as `.env`. Of a symbolic link, both the link and its target are checked.
    """
    reason = _unreadable_reason(path)
    if reason is not None:
        raise InputError(f"{str(path)!r} cannot be read: {reason}", _FIX)


def _unreadable_reason(path: Path) -> str | None:
    """Returns why a file must not be read; None if it may be."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return "it is in a loop of symbolic links"
    if any(real.is_relative_to(folder) for folder in _SYSTEM_FOLDERS):
        return "it is a virtual file of the kernel"
    for name in (path, real):
        if _has_secret_name(name):
            return "files with this name usually contain keys or passwords"
    try:
        kind = stat.S_IFMT(real.stat().st_mode)
    except OSError:
        return None  # opening the file gives a better error
    return f"it is {_SPECIAL_FILES[kind]}, not a file" if kind in _SPECIAL_FILES else None


def _has_secret_name(path: Path) -> bool:
    """Returns whether a file's name or folder conventionally means credentials."""
    if _SECRET_FOLDERS.intersection(part.lower() for part in path.parts):
        return True
    is_data = path.suffix.lower() in _DATA_SUFFIXES
    return not is_data and _SECRET_FILE.fullmatch(path.name) is not None


def parse_error_message(path: Path, error: Exception) -> str:
    """Describes an error of reading or parsing a YAML or JSON file, without quoting the file.

    YAML's own messages quote the line, which could be a secret if the file is not YAML at all.
    """
    mark: Any = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    is_safe = isinstance(error, msgspec.DecodeError | OSError)
    text = str(error) if is_safe else getattr(error, "problem", None) or type(error).__name__
    verb = "read" if isinstance(error, OSError) else "parsed"
    return f"{where}: cannot be {verb}: {_QUOTED.sub('…', str(text))}"

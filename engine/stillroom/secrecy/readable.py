"""Decides which files an operation may read: no devices, no system files, no files of keys."""

import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import InputError

_SYSTEM_FOLDERS = (Path("/proc"), Path("/sys"))
"""Folders in which the kernel shows processes and devices as files."""
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
"""Names of files that hold keys or passwords by convention."""
_DATA_SUFFIXES = frozenset({".jsonl", ".md", ".py"})
"""Endings of data, texts and code, which are readable however they are named."""
_QUOTED = re.compile(r"'[^']{2,}'")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FIX = (
    "give a file of rows, a config or code; what it needs of this file, copy to a file of its own"
)


def check_readable(path: Path) -> None:
    """Raises InputError for a file that no operation may read, before it is opened.

    These are pipes, sockets, devices and the kernel's own files, and files that hold keys by their
    name, such as `.env`. A link is judged by its own name and by its target.
    """
    reason = _refusal(path)
    if reason is not None:
        raise InputError(f"{str(path)!r} cannot be read: {reason}", _FIX)


def _refusal(path: Path) -> str | None:
    try:
        real = path.resolve()
    except (OSError, RuntimeError):  # a circle of links
        return "its links lead nowhere"
    if any(real.is_relative_to(folder) for folder in _SYSTEM_FOLDERS):
        return "the system shows processes and devices there"
    for named in (path, real):
        if _holds_keys(named):
            return "by its name it holds keys or passwords"
    try:
        kind = stat.S_IFMT(real.stat().st_mode)
    except OSError:
        return None  # opening the file reports the error better
    return f"it is {_KINDS[kind]}, not a file" if kind in _KINDS else None


def _holds_keys(path: Path) -> bool:
    if _SECRET_FOLDERS.intersection(part.lower() for part in path.parts):
        return True
    is_data = path.suffix.lower() in _DATA_SUFFIXES
    return not is_data and _SECRET_FILE.fullmatch(path.name) is not None


def unreadable(path: Path, error: Exception) -> str:
    """Returns the error in a YAML or JSON file, and its line, without quoting the file.

    YAML's own messages quote the line, which may hold anything if the file is of another kind.
    """
    mark: Any = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    is_safe = isinstance(error, msgspec.DecodeError | OSError)
    text = str(error) if is_safe else getattr(error, "problem", None) or type(error).__name__
    return f"{where}: not readable: {_QUOTED.sub('…', str(text))}"

"""Hides secrets in command lines and URLs, and puts them back where the command is started.

A hidden secret is replaced by a mark with its hash, so that the same command is still known for
the same, and another secret for another.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import PlainSerializer

from stillroom.errors import InputError
from stillroom.secrecy.redaction import SHORTEST_SECRET, Redactor, is_secret_name

_END = r"(?P<secret>[^\s\"'\\]+)"
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        # The login in a URL, and the values of its query.
        r"://(?P<secret>[^/\s@\"']+)@",
        r"[?&][\w.\[\]-]+=(?P<secret>[^&\s\"'#]+)",
        # NAME=value before a command or after `env`, -e or --env.
        r"(?<![\w.-])[A-Z_][A-Z0-9_]*=\\?[\"']?" + _END,
        # --token value, --api-key=value, api_key=value, {"api_key": "value"}, X-Api-Key: value
        r"(?P<name>[\w.-]+)(?=\\?[\"']?(?:\s*[=:]\s*|\s+)\\?[\"']?" + _END + ")",
        r"(?i:\b(?:bearer|basic|token)\s+)" + _END,
        # Well-known shapes of keys, and long runs of mixed letters and digits.
        r"(?<![\w-])(?P<secret>(?:[sprw]k|gh[pousr]|github_pat|glpat|xox[a-z]|hf|npm)[-_][\w-]{12,})",
        r"(?<![\w])(?P<secret>(?=[A-Za-z_]*\d)(?=\d*[A-Za-z_])[\w+=]{20,})",
    )
)
_MARK = re.compile(r"\{secret:[0-9a-f]{12}\}")


def _hidden(commands: str | Sequence[str] | None) -> str | list[str] | None:
    if commands is None or isinstance(commands, str):
        return commands and without_secrets(commands)
    return [without_secrets(command) for command in commands]


WITHOUT_SECRETS = PlainSerializer(_hidden)
"""Marks a field of command lines, whose secrets are then hidden in every form that is written."""


def hide_secrets(command: str) -> tuple[str, dict[str, str]]:
    """Returns a command line or URL with its secrets as marks, and the secret behind each mark.

    Values of environment variables with a secret's name are hidden anywhere in it.
    """
    secrets: dict[str, str] = {}
    for value in sorted(_found(command), key=len, reverse=True):
        mark = _mark(value)
        replaced = re.sub(rf"(?<![\w]){re.escape(value)}(?!\w)", mark, command)
        if replaced != command:
            secrets[mark] = value
            command = replaced
    return command, secrets


def without_secrets(command: str) -> str:
    """Returns a command line or URL with its secrets as marks."""
    return hide_secrets(command)[0]


def with_secrets(command: str, secrets: Mapping[str, str]) -> str:
    """Returns a command line or URL with the marks replaced by their secrets.

    Raises InputError for a mark whose secret is not known.
    """
    unknown = [mark for mark in _MARK.findall(command) if mark not in secrets]
    if unknown:
        raise InputError(
            f"the secret behind {unknown[0]} in the MCP server `{command}` is not known here",
            "give the command with the secret itself, as it was given at first",
        )
    return _MARK.sub(lambda mark: secrets[mark[0]], command)


def secrets_in(commands: Iterable[str]) -> Redactor:
    """Returns a redactor of the secrets in command lines and URLs."""
    return Redactor(value for command in commands for value in hide_secrets(command)[1].values())


def secrets_of_commands(secrets: Mapping[str, str]) -> dict[str, str]:
    """Returns the secrets of marks in commands, without the keys of endpoints."""
    return {mark: value for mark, value in secrets.items() if _MARK.fullmatch(mark)}


def _found(command: str) -> Iterator[str]:
    command = _MARK.sub("…", command)
    for pattern in _PATTERNS:
        for match in pattern.finditer(command):
            name, value = match.groupdict().get("name"), match["secret"]
            if name is not None and not is_secret_name(name):
                continue
            if not value.startswith(("…", "$", "-")):  # $NAME is only the name of a secret
                yield value
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and is_secret_name(name) and value in command:
            yield value


@functools.lru_cache(maxsize=256)
def _mark(value: str) -> str:
    # A slow hash: marks are written to files, and a short password must not be guessable.
    digest = hashlib.scrypt(value.encode(), salt=b"stillroom", n=1 << 12, r=8, p=1, dklen=6)
    return f"{{secret:{digest.hex()}}}"

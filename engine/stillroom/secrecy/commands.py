"""Replaces secrets in command lines and URLs with placeholders, and restores them for use.

A placeholder contains a hash of its secret, so equal commands stay equal, and commands that differ
only in a secret stay different.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import PlainSerializer

from stillroom.errors import InputError
from stillroom.secrecy.redaction import SHORTEST_SECRET, Redactor, is_secret_name

_VALUE = r"(?P<secret>[^\s\"'\\]+)"
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        # The login in a URL, and the values of its query.
        r"://(?P<secret>[^/\s@\"']+)@",
        r"[?&][\w.\[\]-]+=(?P<secret>[^&\s\"'#]+)",
        # NAME=value before a command or after `env`, -e or --env.
        r"(?<![\w.-])[A-Z_][A-Z0-9_]*=\\?[\"']?" + _VALUE,
        # --token value, --api-key=value, api_key=value, {"api_key": "value"}, X-Api-Key: value
        r"(?P<name>[\w.-]+)(?=\\?[\"']?(?:\s*[=:]\s*|\s+)\\?[\"']?" + _VALUE + ")",
        r"(?i:\b(?:bearer|basic|token)\s+)" + _VALUE,
        # Well-known shapes of keys, and long runs of mixed letters and digits.
        r"(?<![\w-])(?P<secret>(?:[sprw]k|gh[pousr]|github_pat|glpat|xox[a-z]|hf|npm)[-_][\w-]{12,})",
        r"(?<![\w])(?P<secret>(?=[A-Za-z_]*\d)(?=\d*[A-Za-z_])[\w+=]{20,})",
    )
)
_PLACEHOLDER = re.compile(r"\{secret:[0-9a-f]{12}\}")


def _serialize_without_secrets(commands: str | Sequence[str] | None) -> str | list[str] | None:
    if commands is None or isinstance(commands, str):
        return commands and without_secrets(commands)
    return [without_secrets(command) for command in commands]


WITHOUT_SECRETS = PlainSerializer(_serialize_without_secrets)
"""Annotation of a pydantic field with command lines: serialization replaces their secrets."""


def hide_secrets(command: str) -> tuple[str, dict[str, str]]:
    """Returns a command line or URL with placeholders, and the secret of each placeholder.

    The values of environment variables with names of secrets, such as API_KEY, are secrets too.
    """
    secrets: dict[str, str] = {}
    for value in sorted(_find_secrets(command), key=len, reverse=True):
        placeholder = _placeholder(value)
        replaced = re.sub(rf"(?<![\w]){re.escape(value)}(?!\w)", placeholder, command)
        if replaced != command:
            secrets[placeholder] = value
            command = replaced
    return command, secrets


def without_secrets(command: str) -> str:
    """Returns a command line or URL with placeholders for its secrets."""
    return hide_secrets(command)[0]


def restore_secrets(command: str, secrets: Mapping[str, str]) -> str:
    """Returns a command line or URL with the placeholders replaced by their secrets.

    Raises InputError for a placeholder that is not in `secrets`.
    """
    unknown = [each for each in _PLACEHOLDER.findall(command) if each not in secrets]
    if unknown:
        raise InputError(
            f"no secret is stored for the placeholder {unknown[0]} in the MCP server `{command}`",
            "write the secret itself in place of the placeholder",
        )
    return _PLACEHOLDER.sub(lambda match: secrets[match[0]], command)


def redactor_for_commands(commands: Iterable[str]) -> Redactor:
    """Returns a redactor of the secrets in command lines and URLs."""
    return Redactor(value for command in commands for value in hide_secrets(command)[1].values())


def secrets_of_commands(secrets: Mapping[str, str]) -> dict[str, str]:
    """Returns those of `secrets` that a command line's placeholder stands for."""
    return {name: value for name, value in secrets.items() if _PLACEHOLDER.fullmatch(name)}


def _find_secrets(command: str) -> Iterator[str]:
    """Yields the secrets in a command line or URL, some of them repeatedly."""
    command = _PLACEHOLDER.sub("…", command)
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
def _placeholder(value: str) -> str:
    # A slow hash: placeholders are written to files, and a short password must not be guessable.
    digest = hashlib.scrypt(value.encode(), salt=b"stillroom", n=1 << 12, r=8, p=1, dklen=6)
    return f"{{secret:{digest.hex()}}}"

"""The token that callers over HTTP show: from the environment, or a file of the user's own."""

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from stillroom.errors import InputError

TOKEN_VARIABLE = "STILLROOM_TOKEN"  # noqa: S105 (the name of a variable)
_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class ServerToken:
    """The token of a server, and where it stands."""

    value: str
    place: str
    """The path of the file that holds it, or the name of the variable with a dollar sign."""
    is_made: bool
    """Whether it is the one that stillroom made by itself, as nobody gave one."""

    def __repr__(self) -> str:
        return f"ServerToken({self.place})"


def default_token_file() -> Path:
    """Returns the file in the user's state folder that holds the token nobody gave."""
    base = os.environ.get("XDG_STATE_HOME")
    # By this name no tool reads it.
    return (Path(base) if base else Path.home() / ".local" / "state") / "stillroom" / "token"


def server_token(file: str | None) -> ServerToken:
    """Returns the token in `file`, else the variable's, else one that is made once and kept.

    Raises InputError for a file that others may read, or a token that could be guessed.
    """
    if file is not None:
        path = Path(file).expanduser().absolute()
        if not path.exists():
            raise InputError(
                f"the token file {str(path)!r} does not exist",
                f"write one: `(umask 077; openssl rand -hex 32 > {path})`, or leave --token-file "
                "away and stillroom makes one",
            )
        return ServerToken(_read(path), str(path), is_made=False)
    if given := os.environ.get(TOKEN_VARIABLE, "").strip():
        return ServerToken(_checked(given, f"${TOKEN_VARIABLE}"), f"${TOKEN_VARIABLE}", False)
    path = default_token_file()
    if not path.exists():
        _keep(path, secrets.token_urlsafe(32))
    return ServerToken(_read(path), str(path), is_made=True)


def _keep(path: Path, token: str) -> None:
    """Writes a token into a new file that only this user reads, unless another server just did."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with NamedTemporaryFile(dir=path.parent) as stream, suppress(FileExistsError):
        stream.write(f"{token}\n".encode())
        stream.flush()
        os.link(stream.name, path)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read(4096).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise InputError(
            f"the token file {str(path)!r} cannot be read: {error.strerror}",
            "give a file that this user can read, with mode 0600",
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise InputError(
            f"others may read the token file {str(path)!r} (mode {stat.S_IMODE(mode):04o})",
            f"run `chmod 600 {path}`; if others could have read it, write a new token too",
        )
    return _checked(text, str(path))


def _checked(token: str, place: str) -> str:
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            f"the token in {place} is no token: it takes {_SHORTEST} characters or more of ASCII, "
            "without blanks",
            "write a random one, for example with `openssl rand -hex 32`",
        )
    return token

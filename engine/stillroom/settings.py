"""The paths of a workspace, and settings and secrets from environment variables."""

import os
import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from stillroom.errors import InputError
from stillroom.home_paths import home_path, local_path
from stillroom.secrecy.commands import restore_secrets
from stillroom.secrecy.keys import keys_file
from stillroom.secrecy.readable import check_readable
from stillroom.secrecy.redaction import Redactor, is_secret_name
from stillroom.versions import find_version

_WORKSPACE_VARIABLE = "STILLROOM_WORKSPACE"

_DOT_ENV_LINE = re.compile(r"\s*(export\s+)?(?P<name>[A-Za-z_]\w*)\s*=(?P<value>.*)")


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder with the user's projects; nothing is written outside it.

    Models that are converted from GGUF files are an exception: they are in the user's cache folder.
    """

    root: Path
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, compare=False)
    """Secrets that the parent process passed to this one: keys by name, and secrets in the
    command lines of MCP servers by their placeholders."""

    def __post_init__(self) -> None:
        # Files are never written through a link (`places.py`), so links in the root are resolved.
        object.__setattr__(self, "root", self.root.resolve())

    @property
    def runs(self) -> Path:
        """The folder with one folder for each run.

        If it is a link that leads outside the workspace, writing to it is refused.
        """
        runs = self.root / "runs"
        resolved = runs.resolve()
        return resolved if resolved.is_relative_to(self.root) else runs

    def path(self, name: str | Path) -> Path:
        """Returns the absolute path of a name, which may be relative to the workspace.

        Raises InputError for an invalid name.
        """
        try:
            path = local_path(self.root / local_path(name).expanduser())
            # Manifests and requests contain the path, and JSON supports only valid Unicode.
            str(path).encode()
            with suppress(FileNotFoundError, NotADirectoryError):
                path.stat()
        # RuntimeError: an unknown user after `~`; ValueError: NUL, or bytes that are not UTF-8.
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"path {str(name)[:200]!r} cannot be used: {error}",
                "give a plain file path with a UTF-8 name",
            ) from error
        return path

    def existing(self, name: str | Path, *, label: str) -> Path:
        """Returns the path of a file or folder to read, or of a version (`name@tag`, `name@hash`).

        Raises InputError if it does not exist, or must not be read (see `check_readable`). `label`
        is the name of the argument in the error, e.g. "path".
        """
        path = self.path(name)
        check_readable(path)
        if not path.exists() and (version := find_version(self.root, path)) is not None:
            return version
        if not path.exists():
            raise InputError(
                f"{label} {str(name)!r} does not exist (looked at {path})",
                _nearby_files(path) or f"create it, or give a path relative to {self.root}",
            )
        return path

    def writable(self, name: str | Path, *, label: str) -> Path:
        """Returns the path of an output. Raises InputError if it is outside the workspace."""
        path = self.path(name)
        # resolve() follows links, so links that lead outside the workspace are refused.
        resolved = path.resolve()
        if not resolved.is_relative_to(self.root):
            raise InputError(
                f"{label} {str(name)!r} is outside the workspace {self.root}",
                "give a path inside the workspace, or start stillroom with --workspace set to a "
                "folder that contains it",
            )
        if resolved.is_relative_to(keys_file().parent.resolve()):
            raise InputError(
                f"{label} {str(name)!r} is in the folder of keys.yml, where only the user may "
                "write",
                "choose another output",
            )
        return resolved

    def output_file(self, name: str | Path, *, label: str) -> Path:
        """Returns the path of a file to write.

        Raises InputError if it is a folder, has a file as a parent, or is outside the workspace.
        """
        path = self.writable(name, label=label)
        if path.is_dir():
            raise InputError(
                f"{label} {str(name)!r} is a folder", "give the path of a file, e.g. in this folder"
            )
        parent_folder = next((parent for parent in path.parents if parent.exists()), path)
        if not parent_folder.is_dir():
            raise InputError(
                f"{label} {str(name)!r} would be inside {self.shown(parent_folder)}, which is a "
                "file",
                "give the path of a file in a folder",
            )
        return path

    def read_key(self, name: str | None) -> str | None:
        """Returns the secret `name` from the parent process, the environment, or the .env file.

        Returns None if none of them has it, or if `name` is None.
        """
        if not name:
            return None
        return (
            self.secrets.get(name)
            or read_key(name)
            or _dot_env(self.root / ".env").get(name)
            or None
        )

    def key_hosts(self, name: str) -> Sequence[str]:
        """Returns the hosts in the line NAME_HOST of .env, for a key that is also in .env.

        For other keys it returns none: an agent that can write .env could otherwise send keys that
        are not in .env to another host.
        """
        lines = _dot_env(self.root / ".env")
        if not lines.get(name) or lines[name] != self.read_key(name):
            return ()
        return tuple(host.strip() for host in lines.get(f"{name}_HOST", "").split(","))

    def read_keys(self, names: Iterable[str | None]) -> dict[str, str]:
        """Returns the secrets among `names` that are set, by name."""
        keys = {name: self.read_key(name) for name in names if name}
        return {name: key for name, key in keys.items() if key is not None}

    def redactor(self) -> Redactor:
        """Returns a redactor, which removes the secrets of this process from texts.

        Secrets are the values of variables and .env lines whose names look like those of secrets.
        """
        sources = (_dot_env(self.root / ".env"), os.environ, self.secrets)
        return Redactor(
            source[name] for source in sources for name in source if is_secret_name(name)
        )

    def restore_command(self, command: str) -> str:
        """Returns the command line or URL of an MCP server with its hidden secrets restored.

        Raises InputError if this process does not have a secret.
        """
        return restore_secrets(command, self.secrets)

    def shown(self, path: Path) -> str:
        """Returns a path for display: relative to the workspace if it is inside."""
        try:
            return str(local_path(path).resolve().relative_to(self.root))
        except ValueError:
            return home_path(path)


def _nearby_files(path: Path) -> str | None:
    """Returns the text of a fix that lists the files next to a missing one; None without any."""
    folder = path.parent
    if not folder.is_dir():
        return None
    names = sorted(entry.name for entry in folder.iterdir() if _is_listable(entry.name))
    if not names:
        return None
    listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"check the name; {folder} contains: {listed}"


def _is_listable(name: str) -> bool:
    """Returns whether an error may list a file; names that look like sentences are left out."""
    return not name.startswith(".") and name.isprintable() and len(name.split()) <= 3


def open_workspace(root: str | Path | None = None) -> Workspace:
    """Returns the workspace `root`, else $STILLROOM_WORKSPACE, else the current folder."""
    path = Path(root or os.environ.get(_WORKSPACE_VARIABLE) or Path.cwd())
    # Not Path.expanduser, which raises RuntimeError for an unknown user.
    folder = Path(os.path.expanduser(path)).absolute()  # noqa: PTH111
    if not folder.is_dir():
        raise InputError(
            f"the workspace {str(folder)!r} is not a folder",
            "create it, or give another one with --workspace",
        )
    return Workspace(folder)


def read_key(name: str) -> str | None:
    """Returns the secret in the environment variable `name`, or None if it isn't set.

    Surrounding whitespace is removed: a key read from a file may end with a newline, which HTTP
    headers cannot contain.
    """
    return os.environ.get(name, "").strip() or None


def llama_cpp_folder() -> str | None:
    """Returns the folder of llama.cpp that the variable LLAMA_CPP names; None if it is not set."""
    return os.environ.get("LLAMA_CPP", "").strip() or None


def proxy_for(url: str) -> str | None:
    """Returns the URL of the proxy that the environment sets for a URL, or None."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def _dot_env(path: Path) -> dict[str, str]:
    """Returns the values in a .env file by name; lines without NAME=value are skipped."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    matches = (_DOT_ENV_LINE.match(line) for line in lines)
    return {match["name"]: match["value"].strip().strip("\"'") for match in matches if match}


def tracking_environment(workspace: Workspace, *, has_wandb: bool) -> dict[str, str]:
    """Returns the environment variables of a run's trackers: trackio's folder and W&B's key."""
    variables = {"TRACKIO_DIR": os.environ.get("TRACKIO_DIR") or str(workspace.runs / "trackio")}
    key = workspace.read_key("WANDB_API_KEY") if has_wandb else None
    return variables | ({"WANDB_API_KEY": key} if key else {})

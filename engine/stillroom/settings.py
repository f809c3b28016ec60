"""The only reader of the environment, and the keeper of workspace paths."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import InputError

WORKSPACE_VARIABLE = "STILLROOM_WORKSPACE"

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
# Needed to download models, so a training worker keeps it.
_HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder that holds a user's projects; nothing is written outside it."""

    root: Path

    @property
    def runs(self) -> Path:
        """Where run folders live."""
        return self.root / "runs"

    def path(self, given: str | Path) -> Path:
        """Returns the absolute path of `given`, which may be relative to the workspace."""
        text = str(given)
        if "\0" in text:
            raise InputError(f"path {text!r} holds a NUL character", "give a plain file path")
        return self.root / Path(text).expanduser()

    def existing(self, given: str | Path, *, what: str) -> Path:
        """Returns the path of something that is read. Raises InputError if it isn't there."""
        path = self.path(given)
        if not path.exists():
            raise InputError(
                f"{what} {str(given)!r} does not exist (looked at {path})",
                _nearby_files(path) or f"create it, or give a path relative to {self.root}",
            )
        return path

    def writable(self, given: str | Path, *, what: str) -> Path:
        """Returns the path of something to write. Raises InputError outside the workspace."""
        path = self.path(given)
        # resolve() follows links, so a link that leads outside is seen for what it is.
        resolved = path.resolve()
        if not resolved.is_relative_to(self.root.resolve()):
            raise InputError(
                f"{what} {str(given)!r} is outside the workspace {self.root}",
                "give a path inside the workspace, or start stillroom with --workspace set to a "
                "folder that holds it",
            )
        return resolved

    def shown(self, path: Path) -> str:
        """Returns a path as it is shown to a user: relative to the workspace where possible."""
        try:
            return str(path.resolve().relative_to(self.root.resolve()))
        except ValueError:
            return str(path)


def _nearby_files(path: Path) -> str | None:
    folder = path.parent
    if not folder.is_dir():
        return None
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not names:
        return None
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"check the name; {folder} holds: {shown}"


def open_workspace(root: str | Path | None = None) -> Workspace:
    """Returns the workspace at `root`, else at $STILLROOM_WORKSPACE, else the current folder."""
    chosen = Path(root or os.environ.get(WORKSPACE_VARIABLE) or Path.cwd()).expanduser().absolute()
    if not chosen.is_dir():
        raise InputError(
            f"the workspace {str(chosen)!r} is not a folder",
            "create it, or give another one with --workspace",
        )
    return Workspace(chosen)


def read_key(name: str) -> str | None:
    """Returns the secret in the environment variable `name`, or None if it isn't set."""
    return os.environ.get(name) or None


def training_environment() -> dict[str, str]:
    """Returns the environment for training on files alone: no secret but the hub's token."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _HUB_TOKENS or not _SECRET_NAME.search(name)
    }


def tool_environment(*, without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Returns the environment for processes that run the user's tools, which may need secrets."""
    return {name: value for name, value in os.environ.items() if name not in without}

"""What tools.py, rewards.py and MCP servers need on a machine: packages, and files they name."""

import ast
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stillroom.errors import InputError
from stillroom.remote.bundle.layout import FileLayout
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace
from stillroom.tools.mcp.spec import parse_spec
from stillroom.tools.user.file import UserFile
from stillroom.tools.user.modules import modules_imported

_OURS = frozenset({"stillroom", "stillroom_mcp", "rnow"})
_NOT_NAMED = frozenset({"", ".", "..", "runs", ".stillroom", ".git", ".venv", "checkpoints"})
_LONGEST_NAME = 200
_MOST_FILES = 2000
_MOST_BYTES = 256 << 20
"""The most that a folder named by code may hold to be sent with it."""


def packages_of(files: Iterable[UserFile]) -> list[str]:
    """Returns the packages that the user's files import, each with the version that is here.

    Raises InputError for a package that was not installed from an index: nobody else has it.
    """
    names = sorted({name for file in files for name in _foreign_imports(file)})
    if not names:
        return []
    known = _distributions()
    wanted = {dist for name in names for dist in _with_module(name, known)}
    return [_pinned(dist) for dist in sorted(wanted, key=str.lower)]


def add_named_files(
    workspace: Workspace, places: FileLayout, files: Sequence[UserFile], servers: Sequence[str]
) -> list[str]:
    """Adds the files that code and the command lines of MCP servers name; returns notes on them.

    A name is a string in the code that leads to a file or folder of the workspace, from the
    folder of the code or from the workspace.
    """
    sent, left_out = list[str](), list[str]()
    for file in files:
        folders = (file.path.parent, workspace.root)
        for text in sorted({text for code in _codes(file) for text in _strings(code)}):
            _add_named(workspace, places, folders, text, sent, left_out)
    for server in servers:
        for word in parse_spec(server).command:
            _add_named(workspace, places, (workspace.root,), word, sent, left_out)
    notes = [f"sent with the code, which names it: {name}" for name in sorted(sent)]
    return notes + [f"not sent, though the code names it: {name}" for name in left_out]


def _add_named(
    workspace: Workspace,
    places: FileLayout,
    folders: Sequence[Path],
    text: str,
    sent: list[str],
    left_out: list[str],
) -> None:
    path = _path_named(workspace.root, folders, text)
    if path is None or path in places:
        return
    shown = workspace.shown(path)
    if path.is_file():
        places.add(path)
        sent.append(shown)
        return
    files = _within(path)
    if files is None:
        left_out.append(f"{shown} (over {_MOST_FILES} files or {_MOST_BYTES >> 20} MB)")
    elif files:
        for file in files:
            places.add(file)
        sent.append(f"{shown}/ ({len(files)} files)")


def _path_named(root: Path, folders: Sequence[Path], text: str) -> Path | None:
    """Returns the readable file or folder in the workspace to which a name leads, if any."""
    name = text.strip().rstrip("/")
    if name.strip("/") in _NOT_NAMED or len(name) > _LONGEST_NAME or not name.isprintable():
        return None
    # `f"{FOLDER}/kb.json"` holds the text "/kb.json".
    names = [name, name.lstrip("/")] if name.startswith("/") else [name]
    for path in (folder / name for folder in folders for name in names):
        try:
            if not path.exists() or path.resolve() == root:
                continue
            is_inside = path.resolve().is_relative_to(root)
            check_readable(path)
        except (OSError, ValueError, InputError):
            continue
        if is_inside and path not in (root / "runs", root / ".stillroom"):
            return path
    return None


def _within(folder: Path) -> list[Path] | None:
    """Returns the readable files in a folder; None if they are too many or too large."""
    found, num_bytes = list[Path](), 0
    for path in folder.rglob("*"):
        if any(part.startswith(".") or part == "__pycache__" for part in path.parts[-3:]):
            continue
        if not path.is_file():
            continue
        try:
            check_readable(path)
        except InputError:
            continue
        found.append(path)
        num_bytes += path.stat().st_size
        if len(found) > _MOST_FILES or num_bytes > _MOST_BYTES:
            return None
    return sorted(found)


def _codes(file: UserFile) -> Iterator[bytes]:
    yield file.code
    yield from file.modules.values()


def _strings(code: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return  # running the code reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _foreign_imports(file: UserFile) -> Iterator[str]:
    """Yields the modules that a file imports not being Python's, Stillroom's or its own."""
    own = {place.partition("/")[0].removesuffix(".py") for place in file.modules}
    for code in _codes(file):
        for module in modules_imported(code):
            top = module.partition(".")[0]
            if top not in own and top not in _OURS and top not in sys.stdlib_module_names:
                yield module


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _with_module(module: str, known: Mapping[str, list[str]]) -> list[str]:
    """Returns the distributions that a module belongs to: of a shared top level those with it."""
    names = sorted(set(known.get(module.partition(".")[0], ())))
    if len(names) < 2:
        return names
    place = re.compile(re.escape(module.replace(".", "/")) + r"(\.py|/|\.)")
    return [name for name in names if _holds(name, place)] or names


def _holds(name: str, place: re.Pattern[str]) -> bool:
    files = importlib.metadata.distribution(name).files or ()
    return any(place.match(file.as_posix()) for file in files)


def _pinned(name: str) -> str:
    distribution = importlib.metadata.distribution(name)
    source = distribution.read_text("direct_url.json")
    url = json.loads(source).get("url", "") if source else ""
    if url.startswith("file:"):
        folder = unquote(urlsplit(url).path)
        raise InputError(
            f"the code imports {name}, which is installed here from {folder}: another machine "
            "cannot fetch it",
            "put its modules next to the code that imports them, or install it from an index",
        )
    # The build (`+cpu`) depends on the machine.
    return f"{name}=={distribution.version.partition('+')[0]}"

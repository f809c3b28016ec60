"""Finds the packages and files that tools.py, rewards.py and MCP servers need on a machine."""

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

_OWN_PACKAGES = frozenset({"stillroom", "stillroom_mcp", "rnow"})
_IGNORED_NAMES = frozenset({"", ".", "..", "runs", ".stillroom", ".git", ".venv", "checkpoints"})
_MAX_NAME_CHARS = 200
_MAX_FILES = 2000
_MAX_BYTES = 256 << 20
"""The maximum size of a folder that is sent because code refers to it."""


def pinned_packages(files: Iterable[UserFile]) -> list[str]:
    """Returns the packages that the user's files import, pinned to the installed versions.

    Raises InputError for a package that was installed from a local folder instead of an index.
    """
    names = sorted({name for file in files for name in _third_party_imports(file)})
    if not names:
        return []
    distributions = {dist for name in names for dist in _distributions_of(name)}
    return [_pinned_requirement(dist) for dist in sorted(distributions, key=str.lower)]


def add_referenced_files(
    workspace: Workspace, layout: FileLayout, files: Sequence[UserFile], servers: Sequence[str]
) -> list[str]:
    """Adds the files that code and MCP command lines refer to; returns notes for the user.

    A reference is a string literal that is the path of a file or folder in the workspace, relative
    to the code's folder or to the workspace.
    """
    sent, too_large = list[str](), list[str]()
    for file in files:
        folders = (file.path.parent, workspace.root)
        for text in sorted({text for code in _sources(file) for text in _string_literals(code)}):
            _add_referenced(workspace, layout, folders, text, sent, too_large)
    for server in servers:
        for word in parse_spec(server).command:
            _add_referenced(workspace, layout, (workspace.root,), word, sent, too_large)
    notes = [f"sent, because the code refers to it: {name}" for name in sorted(sent)]
    return notes + [f"not sent, although the code refers to it: {name}" for name in too_large]


def _add_referenced(
    workspace: Workspace,
    layout: FileLayout,
    folders: Sequence[Path],
    text: str,
    sent: list[str],
    too_large: list[str],
) -> None:
    """Adds the file or folder that a string refers to; appends its name to one of the two lists."""
    path = _referenced_path(workspace.root, folders, text)
    if path is None or path in layout:
        return
    name = workspace.shown(path)
    if path.is_file():
        layout.add(path)
        sent.append(name)
        return
    files = _files_below(path)
    if files is None:
        too_large.append(f"{name} (more than {_MAX_FILES} files or {_MAX_BYTES >> 20} MB)")
    elif files:
        for file in files:
            layout.add(file)
        sent.append(f"{name}/ ({len(files)} files)")


def _referenced_path(root: Path, folders: Sequence[Path], text: str) -> Path | None:
    """Returns the readable file or folder in the workspace that a string refers to, if any."""
    name = text.strip().rstrip("/")
    if name.strip("/") in _IGNORED_NAMES or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        return None
    # `f"{FOLDER}/kb.json"` has the string literal "/kb.json".
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


def _files_below(folder: Path) -> list[Path] | None:
    """Returns the readable files below a folder; None if they are too many or too large."""
    files, num_bytes = list[Path](), 0
    for path in folder.rglob("*"):
        names = path.relative_to(folder).parts
        if any(name.startswith(".") or name == "__pycache__" for name in names):
            continue
        if not path.is_file():
            continue
        try:
            check_readable(path)
        except InputError:
            continue
        files.append(path)
        num_bytes += path.stat().st_size
        if len(files) > _MAX_FILES or num_bytes > _MAX_BYTES:
            return None
    return sorted(files)


def _sources(file: UserFile) -> Iterator[bytes]:
    """Yields the code of a file and of the modules that it imports from its folder."""
    yield file.code
    yield from file.modules.values()


def _string_literals(code: bytes) -> Iterator[str]:
    """Yields the string literals of Python code; none if it cannot be parsed."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return  # running the code reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _third_party_imports(file: UserFile) -> Iterator[str]:
    """Yields the third-party modules that a file imports."""
    local = {path.partition("/")[0].removesuffix(".py") for path in file.modules}
    for code in _sources(file):
        for module in modules_imported(code):
            top = module.partition(".")[0]
            if top not in local and top not in _OWN_PACKAGES and top not in sys.stdlib_module_names:
                yield module


@lru_cache(maxsize=1)
def _distributions_by_package() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _distributions_of(module: str) -> list[str]:
    """Returns the distributions that provide a module; namespace packages may have several."""
    names = sorted(set(_distributions_by_package().get(module.partition(".")[0], ())))
    if len(names) < 2:
        return names
    pattern = re.compile(re.escape(module.replace(".", "/")) + r"(\.py|/|\.)")
    return [name for name in names if _provides(name, pattern)] or names


def _provides(name: str, pattern: re.Pattern[str]) -> bool:
    """Returns whether a distribution has a file whose path matches."""
    files = importlib.metadata.distribution(name).files or ()
    return any(pattern.match(file.as_posix()) for file in files)


def _pinned_requirement(name: str) -> str:
    """Returns a distribution's requirement, such as `rapidfuzz==3.9`."""
    distribution = importlib.metadata.distribution(name)
    source = distribution.read_text("direct_url.json")
    url = json.loads(source).get("url", "") if source else ""
    if url.startswith("file:"):
        folder = unquote(urlsplit(url).path)
        raise InputError(
            f"the code imports {name}, which is installed from the local folder {folder}: another "
            "machine cannot install it",
            "put its modules next to the code that imports them, or install it from an index",
        )
    # The local version label (`+cpu`) depends on the machine.
    return f"{name}=={distribution.version.partition('+')[0]}"

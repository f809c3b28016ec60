"""The modules that a user's Python file imports from its own folder: read, and run, as they were.

They are found by the file's import statements, and by those of the modules themselves. A module
that is imported under a name made at run time is not found, and is read when it is imported.
"""

import ast
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from stillroom.secrecy.readable import check_readable


def read_modules(file: Path, code: bytes) -> dict[str, bytes]:
    """Returns the code of the modules that a file needs, by their path below the file's folder."""
    found: dict[str, bytes] = {}
    unread = [(code, "")]
    while unread:
        source, package = unread.pop()
        for name in _imported(source, package):
            for place in _places(name):
                path = file.parent / place
                if place not in found and path.is_file():
                    check_readable(path)
                    found[place] = path.read_bytes()
                    unread.append((found[place], _package_of(place)))
    return found


def _imported(code: bytes, package: str) -> Iterator[str]:
    """Yields the names of all modules that code imports, and of the packages around them.

    `package` is the name of the package that the code is part of; "" for none.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return  # whoever runs the code says what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _places(name: str) -> tuple[str, str]:
    """Returns where Python looks for a module, a package first."""
    path = name.replace(".", "/")
    return f"{path}/__init__.py", f"{path}.py"


def _package_of(place: str) -> str:
    return place.rpartition("/")[0].replace("/", ".")


class FixedModules(MetaPathFinder):
    """Finds the modules in a folder as they were read once; what is edited later is not run."""

    def __init__(self, folder: Path, modules: Mapping[str, bytes]) -> None:
        self._folder, self._modules = folder, modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the specification of a module that was read, None for any other."""
        for place in _places(fullname):
            if place in self._modules:
                file = self._folder / place
                loader = _FixedLoader(file, self._modules[place])
                return spec_from_file_location(fullname, file, loader=loader)
        return None


class _FixedLoader(SourceLoader):
    """Loads one module from code in memory. Bytecode on disk may be of another version of it."""

    def __init__(self, file: Path, code: bytes) -> None:
        self._file, self._code = str(file), code

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: Any) -> bytes:
        if path != self._file:
            raise OSError(f"{path} is not read")
        return self._code

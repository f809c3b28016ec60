"""Finds the modules that a user's Python file imports; provides those of its folder and of rnow.

The modules in the file's folder are found through the import statements of the file and of those
modules, and are read before the file runs. A module whose name is computed at run time is read when
it is imported. Other modules must be installed; the error about a missing one says how. Projects
written for rnow import its decorators and run unchanged: Stillroom provides its own modules under
the names of rnow's, even if rnow is installed.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from stillroom.errors import ToolFileError
from stillroom.secrecy.readable import check_readable


def read_modules(file: Path, code: bytes) -> dict[str, bytes]:
    """Returns the code of the modules that a file imports, by path relative to its folder."""
    codes: dict[str, bytes] = {}
    unread = [(code, "")]
    while unread:
        source, package = unread.pop()
        for name in _imported_names(source, package):
            for relative in _module_files(name):
                path = file.parent / relative
                if relative not in codes and path.is_file():
                    check_readable(path)
                    codes[relative] = path.read_bytes()
                    unread.append((codes[relative], relative.rpartition("/")[0].replace("/", ".")))
    return codes


def _imported_names(code: bytes, package: str) -> Iterator[str]:
    """Yields the names of all modules that code imports, and of their parent packages.

    `package` is the name of the package that the code is part of; "" for none.
    """
    for node in ast.walk(_parse(code)):
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


def _parse(code: bytes) -> ast.AST:
    """Returns the syntax tree of code; an empty one if the syntax is invalid.

    Running the code reports the error.
    """
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _module_files(name: str) -> tuple[str, str]:
    """Returns the relative paths where Python looks for a module, a package first."""
    path = name.replace(".", "/")
    return f"{path}/__init__.py", f"{path}.py"


class InMemoryModules(MetaPathFinder):
    """Imports the modules of a folder from code read once; later edits have no effect."""

    def __init__(self, folder: Path, modules: Mapping[str, bytes]) -> None:
        self._folder, self._modules = folder, modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the specification of a module that was read; None for any other module."""
        for relative in _module_files(fullname):
            if relative in self._modules:
                file = self._folder / relative
                loader = _InMemoryLoader(file, self._modules[relative])
                return spec_from_file_location(fullname, file, loader=loader)
        return None


class _InMemoryLoader(SourceLoader):
    """Loads one module from code in memory, since bytecode on disk may be outdated."""

    def __init__(self, file: Path, code: bytes) -> None:
        self._file, self._code = str(file), code

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: Any) -> bytes:
        if path != self._file:
            raise OSError(f"{path} was not read")
        return self._code


_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "github": "pygithub",
    "jwt": "pyjwt",
    "psycopg2": "psycopg2-binary",
    "serpapi": "google-search-results",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""The package to install for a module with another name."""


def names_not_imported(code: bytes, offered: frozenset[str]) -> frozenset[str]:
    """Returns the names of `offered` that code uses without importing or defining them.

    The result is empty if the code has a `from … import *`, which may define any name, or invalid
    syntax.
    """
    used, bound = set[str](), set[str]()
    for node in ast.walk(_parse(code)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        else:
            bound.update(_names_bound_by(node))
    return frozenset() if "*" in bound else offered & (used - bound)


def _names_bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def modules_missing_in_functions(code: bytes, folder: Path) -> list[str]:
    """Returns modules imported within functions that are neither in `folder` nor installed.

    An import within `try` is left out, since the code works without it.
    """
    tree = ast.parse(code)
    tried = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try)
             for node in ast.walk(block)}  # fmt: skip
    names = {
        name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if id(node) not in tried
        for name in _imported_by(node)
    }
    top_level = {name.partition(".")[0] for name in names}
    return sorted(name for name in top_level if not _is_available(name, folder))


def _imported_by(node: ast.AST) -> list[str]:
    """Returns the modules that a statement imports, without those of its own package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _is_available(name: str, folder: Path) -> bool:
    if name in sys.modules or (folder / f"{name}.py").exists() or (folder / name).is_dir():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def modules_imported(code: bytes) -> list[str]:
    """Returns the absolute names of the modules that code imports; none if its syntax is invalid.

    Imports from the package that the code is part of are left out.
    """
    return sorted({name for node in ast.walk(_parse(code)) for name in _imported_by(node)})


def how_to_install(module: str, folder: Path) -> str:
    """Returns how to install or add a missing module that a file in `folder` imports."""
    name = module.partition(".")[0]
    listed = folder / "requirements.txt"
    package = _PACKAGES.get(name, name.replace("_", "-"))
    wanted = f"-r {listed}" if listed.is_file() else package
    return (
        f"run `{sys.executable} -m pip install {wanted}` or, if {name} is your own module, put "
        f"{name}.py next to the file"
    )


_PACKAGE = "rnow"
_JUDGE = "llm_judge"
_OFFERED = {
    "rnow": (),
    "rnow.core": ("tool", "reward", "ToolArgs", "RewardArgs", "get_response"),
    "rnow.core.tool": ("tool", "ToolArgs"),
    "rnow.core.reward": ("reward", "RewardArgs"),
    "rnow.core.llm_judge": (),
    "rnow.models": ("ToolArgs", "RewardArgs", "get_response"),
}
"""The names that Stillroom provides for each module of rnow."""


class RnowModules(MetaPathFinder, Loader):
    """Imports rnow's modules, replaced by modules with Stillroom's own objects."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        """`names` holds Stillroom's objects by the names that rnow gives them."""
        self._names = names
        self.is_used = False
        """Whether a file has imported rnow."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the specification of rnow's package, or None for any other module.

        Raises ToolFileError for a module of rnow that is not supported.
        """
        if fullname == _PACKAGE:
            self.is_used = True
            return spec_from_loader(fullname, self, is_package=True)
        if fullname.startswith(f"{_PACKAGE}."):
            raise ToolFileError(
                f"it imports {fullname}, which stillroom does not provide",
                f"tools.py and rewards.py may import {', '.join(_OFFERED)}",
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the package, with all its modules in it.

        All are created together: a module imported later would replace the decorator of the same
        name in `rnow.core`.
        """
        modules = {name: _module(name, offered, self._names) for name, offered in _OFFERED.items()}
        sys.modules.update(modules)
        modules[_PACKAGE].__dict__.update(core=modules["rnow.core"], models=modules["rnow.models"])
        return modules[_PACKAGE]

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, since the module is already complete."""


def _module(name: str, offered: tuple[str, ...], provided: Mapping[str, Any]) -> ModuleType:
    """Returns a module of rnow with the offered names; any other name raises ToolFileError."""
    module = ModuleType(name, "A module of rnow, made of stillroom's names.")

    def missing(wanted: str) -> Any:
        if wanted == _JUDGE:
            raise ToolFileError(
                "it imports llm_judge, whose calls would have no API key and not count against "
                "the budget",
                "write the question as a rubric into judge.yml, give it as `judge`, and name "
                "'judge' in the rows' rewards (skill rollout-rewards)",
            )
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        raise ToolFileError(
            f"it imports {wanted} from {name}, which stillroom does not provide",
            f"{name} provides {', '.join(offered) or 'nothing'}",
        )

    module.__dict__.update({each: provided[each] for each in offered}, __getattr__=missing)
    if name in (_PACKAGE, "rnow.core"):
        module.__path__ = []
    return module

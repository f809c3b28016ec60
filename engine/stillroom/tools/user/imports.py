"""The imports of a user's Python file: names that it did not import, modules not installed."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

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
"""The packages whose modules have another name."""


def names_not_imported(code: bytes, offered: frozenset[str]) -> frozenset[str]:
    """Returns which of the offered names code uses without importing or defining them.

    They are none if the code has a `from … import *`, which may define any name, or bad syntax.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()  # whoever runs the code says what is wrong with it
    used, bound = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        else:
            bound.update(_bound_by(node))
    return frozenset() if "*" in bound else offered & (used - bound)


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def modules_missing_later(code: bytes, folder: Path) -> list[str]:
    """Returns the modules that only functions import, and that are neither here nor installed.

    An import within `try` is not among them, since the code goes on without it.
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
    return sorted(name for name in names if not _is_there(name, folder))


def _imported_by(node: ast.AST) -> list[str]:
    """Returns the top-level modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


def _is_there(name: str, folder: Path) -> bool:
    if name in sys.modules or (folder / f"{name}.py").exists() or (folder / name).is_dir():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def modules_imported(code: bytes) -> list[str]:
    """Returns the modules that code imports by their whole names; none of code with bad syntax.

    Imports from the package that the code is part of are left out.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return sorted(names)


def how_to_install(module: str, folder: Path) -> str:
    """Returns the command that installs a missing module for this Python; `folder` imports it."""
    name = module.partition(".")[0]
    listed = folder / "requirements.txt"
    package = _PACKAGES.get(name, name.replace("_", "-"))
    wanted = f"-r {listed}" if listed.is_file() else package
    return (
        f"install it for the Python that runs it: `{sys.executable} -m pip install {wanted}` (or, "
        f"if {name} is yours, put {name}.py beside the file)"
    )

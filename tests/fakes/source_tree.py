"""The modules of the engine and the server as they stand in their files, and what they import."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "server")


@cache
def modules() -> dict[str, Path]:
    """Returns the file of every module by the module's dotted name."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_of(path): path for path in files}


def module_of(path: Path) -> str:
    """Returns the dotted name of the module in a file of the engine or the server."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of the syntax tree of a file."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Returns the modules of ours that a file imports anywhere, inside functions too."""
    imported = set[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imported.add(inner if inner in modules() else node.module)
    return frozenset(imported & modules().keys())


def starts(path: Path, module: str) -> bool:
    """Returns whether a text of a file names a module, as the command line of a process does.

    The table of operations names functions as `module:function`.
    """
    texts = (node.value for node in nodes_of(path) if isinstance(node, ast.Constant))
    return any(isinstance(text, str) and text.split(":")[0] == module for text in texts)

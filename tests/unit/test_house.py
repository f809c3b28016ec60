"""Where modules lie, how large they may be, and what things may not be called."""

import ast
import dataclasses
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fakes.source_tree import PACKAGES, ROOT, imports_of, modules, nodes_of, tree_of
from stillroom.api import OPERATIONS, Operation
from stillroom.importing.records import TraceFormat
from stillroom.teachers.providers import Provider
from stillroom.train.config.losses import Loss
from stillroom.train.config.schema import CONFIGS

MAX_MODULES_IN_A_FOLDER = 18
MAX_LINES_IN_A_FILE = 500
RIDDLES = frozenset({"told", "asked", "theirs", "how"})
"""Words that say nothing of what they name."""


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns each set of modules that all lead to one another.

    Source: Tarjan, Depth-first search and linear graph algorithms (1972).
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circular: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in order:
                visit(imported)
            if imported in stack:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == order[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                circular.append(sorted(stack[start:]))
            del stack[start:]

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return circular


def names_given(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and name of each variable, parameter, attribute and function."""
    for node in nodes_of(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case _:
                pass


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"d"}}, [["a", "b", "c"]]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
    ],
)
def test_a_circle_is_found(graph, expected):
    assert circles(graph) == expected


@pytest.mark.thorough
def test_no_modules_import_one_another_in_a_circle():
    assert circles({name: imports_of(path) for name, path in modules().items()}) == []


def test_no_folder_holds_more_modules_than_can_be_taken_in_at_a_glance():
    num_modules = defaultdict[Path, int](int)
    for path in modules().values():
        num_modules[path.parent.relative_to(ROOT)] += 1
    assert {f: n for f, n in num_modules.items() if n > MAX_MODULES_IN_A_FOLDER} == {}


def test_no_file_is_too_long_to_be_read_at_once():
    num_lines = {
        path.relative_to(ROOT): path.read_text(encoding="utf-8").count("\n")
        for path in modules().values()
    }
    assert {f: n for f, n in num_lines.items() if n > MAX_LINES_IN_A_FILE} == {}


def test_no_two_public_classes_of_a_package_have_the_same_name():
    places = defaultdict[tuple[str, str], list[str]](list)
    for name, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[name.partition(".")[0], node.name].append(name)
    assert {name: where for (_, name), where in places.items() if len(where) > 1} == {}


def test_no_name_is_a_riddle():
    riddles = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules().values()
        for line, name in names_given(path)
        if name in RIDDLES
    ]
    assert riddles == []


def test_nothing_needs_a_compiler():
    assert [path for package in PACKAGES for path in (ROOT / package).rglob("*.[ch]")] == []


def models_in(model: Any) -> Iterator[type[BaseModel]]:
    """Yields a pydantic model, and those of its fields."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        yield model
        for field in model.model_fields.values():
            yield from models_in(field.annotation)
    for part in typing.get_args(model):
        yield from models_in(part)


def names_read() -> set[str]:
    """Returns the attributes that the code reads, and the texts by which it may read others."""
    nodes = [node for path in modules().values() for node in nodes_of(path)]
    return {
        *(n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)),
        *(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)),
    }


def test_no_option_and_no_column_of_a_table_is_ignored() -> None:
    given = [*(operation.request for operation in OPERATIONS), *CONFIGS.values()]
    options = {
        (model.__name__, name)
        for start in given
        for model in models_in(start)
        for name in model.model_fields
    }
    columns = {
        (table.__name__, field.name)
        for table in (Operation, Loss, Provider, TraceFormat)
        for field in dataclasses.fields(table)
    }
    read = names_read()
    assert sorted((of, name) for of, name in options | columns if name not in read) == []

"""The reference of `stillroom.api` on the site, made from docstrings and types.

Results are read from the source, since some modules with the results of runs import torch.
"""

import ast
import functools
import inspect
import re
import typing
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from stillroom import api, errors
from stillroom.jobs.operations import Operation
from stillroom.settings import Workspace

ENGINE = Path(__file__).parents[2] / "engine"
_OTHER_FUNCTIONS = (api.carry_out, api.read_run_metrics, api.show_prices)
_OTHER_RESULTS = (api.RunMetrics, api.ShownPrices)
_MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])")
_INTRODUCTIONS = {
    "Operations": "",
    "Other functions": "",
    "Requests": (
        "All fields are keyword arguments. A request is checked when it is created: an unknown "
        "field or a wrong value raises `pydantic.ValidationError`."
    ),
    "Results": "All are frozen; `msgspec.to_builtins` makes a dictionary of one.",
    "Workspace and errors": "",
}


class Result(NamedTuple):
    """A class of a result."""

    module: str
    name: str


def api_reference() -> str:
    """Returns the sections that follow the introduction in docs/python.md."""
    results = map(_result, result_types())
    sections = zip(
        _INTRODUCTIONS.items(),
        (
            map(_operation, api.OPERATIONS),
            (_function(str(inspect.signature(each)), each) for each in _OTHER_FUNCTIONS),
            (_request(operation.request) for operation in api.OPERATIONS),
            (text for text in results if text),
            (_error_class(kind) for kind in (Workspace, *_error_types())),
        ),
        strict=True,
    )
    return "".join(
        f"\n## {title}\n\n{introduction}\n\n" + "\n".join(parts)
        for (title, introduction), parts in sections
    )


def result_types() -> list[Result]:
    """Returns the classes of all results, and those that they contain."""
    waiting = [Result(kind.__module__, kind.__name__) for kind in _OTHER_RESULTS]
    for operation in api.OPERATIONS:
        waiting += [Result(operation.result.__module__, operation.result.__name__)]
        waiting += _run_results(operation)
    found = dict[Result, None]()
    while waiting:
        found[kind := waiting.pop(0)] = None
        fields = [each for each in _class(kind).body if isinstance(each, ast.AnnAssign)]
        inner = [each for field in fields for each in _named_in(kind.module, field.annotation)]
        waiting += [each for each in inner if each not in found]
    return list(found)


def _run_results(operation: Operation) -> list[Result]:
    """Returns what an operation's run returns, which is `result` of the run's report."""
    module, _, name = operation.run.function.partition(":") if operation.run else ("", "", "")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = _tree(module).body if module else []
    made = [node for node in body if isinstance(node, functions) and node.name == name]
    return [kind for node in made[:1] if node.returns for kind in _named_in(module, node.returns)]


def _named_in(module: str, annotation: ast.expr) -> list[Result]:
    """Returns the classes with fields that an annotation names."""
    modules = {
        alias.name: node.module or ""
        for node in _tree(module).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = re.findall(r"\w+", ast.unparse(annotation))
    kinds = [Result(modules.get(name, module), name) for name in names]
    return [kind for kind in kinds if any(isinstance(p, ast.AnnAssign) for p in _class(kind).body)]


def _class(kind: Result) -> ast.ClassDef:
    """Returns the definition of a class; an empty one if it is not a class of Stillroom."""
    body = _tree(kind.module).body if kind.module.startswith("stillroom.") else []
    defined = (n for n in body if isinstance(n, ast.ClassDef) and n.name == kind.name)
    return next(defined, ast.ClassDef(kind.name, [], [], [], []))


@functools.cache
def _tree(module: str) -> ast.Module:
    path = ENGINE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _operation(operation: Operation) -> str:
    request, result = operation.request.__name__, operation.result.__name__
    signature = f"(workspace: Workspace, request: {request}) -> {result}"
    links = [f"[`{name}`](#{name.lower()})" for name in (request, result)]
    made = " or ".join(f"[`{kind.name}`](#{kind.name.lower()})" for kind in _run_results(operation))
    run = f" The `result` of the run has the fields of {made}." if made else ""
    tool = f"[as a tool and a command](reference.md#{operation.name})"
    text = _function(signature, getattr(api, operation.name))
    return f"{text}\nTypes: {', '.join(links)}.{run} See also: {tool}.\n"


def _function(signature: str, function: Any) -> str:
    name, short = function.__name__, _MODULE.sub("", signature)
    return f"### `{name}`\n\n```python\n{name}{short}\n```\n\n{_text(inspect.getdoc(function))}\n"


def _error_types() -> list[type]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, errors.EngineError)]


def _error_class(kind: type) -> str:
    place = f"`from {kind.__module__} import {kind.__name__}`"
    return f"### `{kind.__name__}`\n\n{place}\n\n{_text(inspect.getdoc(kind))}\n"


def _request(request: type[BaseModel]) -> str:
    hints, rows = typing.get_type_hints(request), list[list[str]]()
    for name, field in request.model_fields.items():
        default = "**required**"
        if not field.is_required():
            default = f"`{field.get_default(call_default_factory=True)!r}`"
        kind = _MODULE.sub("", inspect.formatannotation(hints[name]))
        rows.append([f"`{name}`", f"`{kind}`", default, field.description or ""])
    head = ["field", "type", "default", "meaning"]
    return f"### `{request.__name__}`\n\n{_text(inspect.getdoc(request))}\n\n{_table(head, rows)}"


def _result(kind: Result) -> str:
    node, rows = _class(kind), list[list[str]]()
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            annotation = re.sub(r"\b(Others|Own)Text\b", "str", ast.unparse(field.annotation))
            meaning = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                meaning = str(after.value.value)
            rows.append([f"`{ast.unparse(field.target)}`", f"`{annotation}`", meaning])
    text = _text(ast.get_docstring(node))
    return f"### `{kind.name}`\n\n{text}\n\n{_table(['field', 'type', 'meaning'], rows)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = [[_text(" ".join(c.split())).replace("|", "\\|") for c in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *cells])


def _text(text: str | None) -> str:
    """Returns a docstring as Markdown, in which `<` outside of code opens no tag."""
    parts = (text or "").split("`")
    return "`".join(
        [part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(parts)]
    )

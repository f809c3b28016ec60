"""Supervised rows whose `tools` are names of functions in tools.py, and not their schemas."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stillroom.errors import DataError
from stillroom.types import ToolSchema
from stillroom.validation import nearest

_NAMES = re.compile(rb'"tools"\s*:\s*\[\s*"')
"""A list of names in a row. Within a text the quotes would have backslashes before them."""
_CHUNK_BYTES = 1 << 20
_OVERLAP_BYTES = 256

NamedTools = Mapping[str, ToolSchema]
"""The schemas of the functions in tools.py, by their names."""


def has_tool_names(path: Path) -> bool:
    """Returns whether a row of a file names its tools, in place of their schemas."""
    with path.open("rb") as stream:
        before = b""
        while chunk := stream.read(_CHUNK_BYTES):
            if _NAMES.search(before + chunk):
                return True
            before = chunk[-_OVERLAP_BYTES:]
    return False


def are_names(tools: Any) -> bool:
    """Returns whether a row's `tools` are names: a list of texts, and of nothing else."""
    return isinstance(tools, list) and all(isinstance(t, str) for t in cast("list[Any]", tools))


def named_schemas(
    tools: Sequence[Any], named: NamedTools | None, *, where: str = "the row"
) -> list[ToolSchema]:
    """Returns a row's tool schemas, those of the named functions if it has names.

    `named` is None if there is no tools.py. Raises DataError for a name that it does not have.
    """
    schemas: list[ToolSchema] = []
    for tool in tools:
        if not isinstance(tool, str):
            schemas.append(tool)
        elif named is not None and tool in named:
            schemas.append(named[tool])
        elif named is None:
            raise DataError(
                f"{where} names the tool {tool!r}, but no tools.py was found",
                "put tools.py next to the configuration and the rows, or write the tools' schemas",
            )
        else:
            raise DataError(
                f"{where} names the tool {tool!r}, which tools.py does not have"
                + (nearest(tool, list(named)) or f" (it has: {', '.join(named)})"),
                "add the function with @tool, or correct the row's tools",
            )
    return schemas

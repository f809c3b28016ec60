"""Replaces tool names in rows with answers by the schemas of the functions in tools.py."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stillroom.errors import DataError
from stillroom.types import ToolSchema
from stillroom.validation import did_you_mean

_NAMES = re.compile(rb'"tools"\s*:\s*\[\s*"')
"""A list of tool names in a row. In a JSON string, the quotes would be escaped."""
_CHUNK_BYTES = 1 << 20
_OVERLAP_BYTES = 256

NamedTools = Mapping[str, ToolSchema]
"""The schemas of the functions in tools.py, by their names."""


def has_tool_names(path: Path) -> bool:
    """Returns whether a row of a file has tool names instead of schemas."""
    with path.open("rb") as stream:
        before = b""
        while chunk := stream.read(_CHUNK_BYTES):
            if _NAMES.search(before + chunk):
                return True
            before = chunk[-_OVERLAP_BYTES:]
    return False


def are_names(tools: Any) -> bool:
    """Returns whether a row's `tools` are names, i.e. a list of strings."""
    return isinstance(tools, list) and all(isinstance(t, str) for t in cast("list[Any]", tools))


def named_schemas(
    tools: Sequence[Any], named_tools: NamedTools | None, *, where: str = "the row"
) -> list[ToolSchema]:
    """Returns a row's tool schemas; tool names are replaced by the schemas in `named_tools`.

    `named_tools` is None if there is no tools.py. Raises DataError for an unknown name.
    """
    schemas: list[ToolSchema] = []
    for tool in tools:
        if not isinstance(tool, str):
            schemas.append(tool)
        elif named_tools is not None and tool in named_tools:
            schemas.append(named_tools[tool])
        elif named_tools is None:
            raise DataError(
                f"{where} names the tool {tool!r}, but no tools.py was found",
                "put tools.py next to config.yml and the rows, or write the schemas of the tools",
            )
        else:
            raise DataError(
                f"{where} names the tool {tool!r}, which is not in tools.py"
                + (did_you_mean(tool, list(named_tools)) or f" (it has: {', '.join(named_tools)})"),
                "add the function with @tool to tools.py, or correct the row's tools",
            )
    return schemas

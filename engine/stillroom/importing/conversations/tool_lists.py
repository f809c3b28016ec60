"""The lists of tools that sources name, each kept once; and schemas inferred from tool calls."""

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from stillroom.data.checks import tool_schema_problems

_MOST_INFERRED = 64
"""More tools than these are from several systems; a rollout is then given those that it calls."""
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


class ToolLists:
    """All lists of tool schemas that the sources name, by number."""

    def __init__(self) -> None:
        self._by_json: dict[bytes, int] = {}
        self._lists: list[list[dict[str, Any]]] = []

    def number_of(self, tools: list[dict[str, Any]]) -> int:
        """Returns the number of a list of tools."""
        data = msgspec.json.encode(tools)
        number = self._by_json.get(data)
        if number is None:
            number = self._by_json[data] = len(self._lists)
            self._lists.append(tools)
        return number

    def united(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Returns the tools of several lists; of schemas with one name, the last."""
        by_name: dict[str, dict[str, Any]] = {}
        for number in dict.fromkeys(numbers):
            by_name |= {tool["function"]["name"]: tool for tool in self._lists[number]}
        return list(by_name.values())


def sound_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns those tools of a source that have a schema; providers' own tools have none."""
    return [tool for tool in tools if next(tool_schema_problems([tool]), None) is None]


class InferredTools:
    """Schemas of tools made from the arguments with which they were called."""

    def __init__(self) -> None:
        self._arguments: dict[str, dict[str, set[str]]] = {}

    def look_at(self, message: dict[str, Any]) -> None:
        """Takes note of the tool calls of a message in our shape."""
        for call in message["tool_calls"]:
            function = call["function"]
            known = self._arguments.setdefault(function["name"], {})
            for name, value in _decoded(function["arguments"]).items():
                kinds = known.setdefault(name, set())
                if (kind := _KINDS.get(type(value))) is not None:
                    kinds.add(kind)

    def schemas(self, called: Iterable[str]) -> list[dict[str, Any]]:
        """Returns the inferred schemas for a rollout that calls these tools, sorted by name."""
        is_few = len(self._arguments) <= _MOST_INFERRED
        names = self._arguments if is_few else set(called)
        return [self._schema(name) for name in sorted(names)]

    def _schema(self, name: str) -> dict[str, Any]:
        properties = {
            argument: {"type": next(iter(kinds)) if len(kinds) == 1 else sorted(kinds)}
            if kinds
            else {}
            for argument, kinds in sorted(self._arguments.get(name, {}).items())
        }
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _decoded(arguments: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

"""Makes a tool's JSON schema from its function's signature, and checks a model's arguments."""

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from stillroom.errors import ToolFileError
from stillroom.types import ToolSchema

_TASK_PARAMETER = "args"
_JSON_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_CORE_SCHEMAS: dict[Any, Callable[[], CoreSchema]] = {
    str: core_schema.str_schema,
    int: core_schema.int_schema,
    float: core_schema.float_schema,
    bool: core_schema.bool_schema,
    Any: core_schema.any_schema,
}


class ArgumentError(Exception):
    """A model's arguments do not fit the tool's parameters; the text is shown to the model."""


def tool_schema(function: Callable[..., Any], *, name: str | None = None) -> ToolSchema:
    """Returns the schema of a tool called `name`, by default the name of its function.

    Raises ToolFileError if the function has no docstring, or a parameter has no type or one that
    JSON schema cannot express.
    """
    description = inspect.getdoc(function)
    if not description:
        raise _tool_error(function, "has no docstring", "describe the tool in a docstring")
    hints = _parameter_types(function)
    parameters = inspect.signature(function).parameters
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {n: _json_type(function, n, kind) for n, kind in hints.items()},
        "required": [n for n in hints if parameters[n].default is inspect.Parameter.empty],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {
            "name": name or function.__name__,
            "description": description,
            "parameters": schema,
        },
    }


class ArgumentChecker:
    """Checks the arguments of one tool and converts them, e.g. "3" to 3 for a whole number."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        # Not pydantic's create_model: a parameter `json` or `copy` would shadow a model's method.
        fields = {
            name: core_schema.typed_dict_field(
                core_schema_of(kind),
                required=parameters[name].default is inspect.Parameter.empty,
            )
            for name, kind in _parameter_types(function).items()
        }
        self._validator = SchemaValidator(
            core_schema.typed_dict_schema(fields, extra_behavior="forbid")
        )

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments converted to the parameters' types. Raises ArgumentError."""
        try:
            return self._validator.validate_python(arguments)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
            )
            raise ArgumentError(f"wrong arguments: {faults}") from error


def core_schema_of(kind: Any) -> CoreSchema:
    """Returns the pydantic-core schema that checks a type.

    Types that are common in tools are translated here, because importing pydantic takes longer than
    everything else that a worker does before its first call.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if plain := _CORE_SCHEMAS.get(kind):
        return plain()
    if origin is Literal:
        return core_schema.literal_schema(list(inner))
    if origin is list:
        return core_schema.list_schema(core_schema_of(inner[0]))
    if origin is dict:
        return core_schema.dict_schema(core_schema_of(inner[0]), core_schema_of(inner[1]))
    if origin in (Union, types.UnionType) and type(None) in inner:
        others = Union[tuple(member for member in inner if member is not type(None))]  # noqa: UP007
        return core_schema.nullable_schema(core_schema_of(others))
    if origin in (Union, types.UnionType):
        return core_schema.union_schema([core_schema_of(member) for member in inner])
    from pydantic import TypeAdapter

    return TypeAdapter(kind).core_schema


def has_task_parameter(function: Callable[..., Any]) -> bool:
    """Returns whether a tool has the parameter `args`, which receives the task's metadata."""
    return _TASK_PARAMETER in inspect.signature(function).parameters


def _parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of a tool's parameters, without `args`. Raises ToolFileError."""
    try:
        hints = get_type_hints(function)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise _tool_error(function, f"has an unknown type: {error}", "import the type") from error
    types_by_name: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _tool_error(function, f"takes *{name}", "name every parameter")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise _tool_error(
                function, f"has the positional-only parameter {name!r}", "remove the /"
            )
        if name == _TASK_PARAMETER:
            continue
        if name not in hints:
            raise _tool_error(
                function, f"has no type for parameter {name!r}", "write e.g. `item: str`"
            )
        types_by_name[name] = hints[name]
    return types_by_name


def _json_type(function: Callable[..., Any], name: str, kind: Any) -> dict[str, Any]:
    """Returns the JSON schema of a parameter's type. Raises ToolFileError."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _JSON_TYPES:
        return dict(_JSON_TYPES[kind])
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _json_type(function, name, inner[0])}
    if origin is dict:
        return {
            "type": "object",
            "additionalProperties": _json_type(function, name, inner[1]),
        }
    if origin in (Union, types.UnionType):
        return _union_schema(function, name, inner)
    raise _tool_error(
        function,
        f"has a type for parameter {name!r} that JSON schema cannot express: {kind!r}",
        "use str, int, float, bool, list, dict, Literal, Optional or a union of these",
    )


def _union_schema(
    function: Callable[..., Any], name: str, inner: tuple[Any, ...]
) -> dict[str, Any]:
    """Returns the JSON schema of a union, in its short form for an optional type."""
    members = [_json_type(function, name, kind) for kind in inner]
    others = [member for member in members if member != {"type": "null"}]
    if len(others) == 1 and len(members) == 2 and set(others[0]) == {"type"}:
        return {"type": [others[0]["type"], "null"]}
    return {"anyOf": members}


def _tool_error(function: Callable[..., Any], problem: str, fix: str) -> ToolFileError:
    code = function.__code__
    where = f"{Path(code.co_filename)}:{code.co_firstlineno}"
    return ToolFileError(f"{where}: tool {function.__name__!r} {problem}", fix)

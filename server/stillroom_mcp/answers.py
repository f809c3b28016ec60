"""The results of tools as an agent reads them, and the schemas of arguments and results."""

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import msgspec
import pydantic_core
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR
from pydantic import BaseModel

from stillroom.api import Operation, RunReport, operation_named, operation_of_run
from stillroom.settings import Workspace
from stillroom_mcp.fencing import fenced_answer, quotable_result
from stillroom_mcp.next_steps import after_run, large_result, next_step, poll_after_s

_REF = "#/$defs/{name}"


def structured_content(
    workspace: Workspace, operation: Operation, request: Any, result: msgspec.Struct
) -> dict[str, Any]:
    """Returns the result as JSON values with `next_step`, and `poll_after_s` for a run.

    Text from others is between marks (see `fenced_answer`). Secrets that this process can read are
    removed, whichever file they came from.
    """
    answer: dict[str, Any] = _rounded(fenced_answer(result))
    quotable = quotable_result(result)
    if isinstance(result, RunReport):
        answer["poll_after_s"] = poll_after_s(result)
        if (inner := large_result(result) or _typed_result(result)) is not None:
            answer["result"] = _rounded(fenced_answer(inner))
            inner_values = msgspec.to_builtins(quotable_result(inner))
            quotable = msgspec.structs.replace(quotable, result=inner_values)
    if isinstance(quotable, RunReport) and operation.may_become_run:
        answer["next_step"] = after_run(request, quotable)
    else:
        answer["next_step"] = next_step(operation, request, quotable)
    return workspace.redactor().redact_value(answer)


def _typed_result(run: RunReport) -> msgspec.Struct | None:
    """Returns the result of a finished run whose operation declares its type; otherwise None."""
    work = operation_of_run(run.kind).run
    if run.result is None or work is None or work.result is None:
        return None
    # Another version of Stillroom may have written other fields.
    with suppress(msgspec.ValidationError):
        return msgspec.convert(run.result, work.result)
    return None


def structured_result(workspace: Workspace, result: msgspec.Struct) -> dict[str, Any]:
    """Returns a result as JSON values, with marks, without a next step and without secrets."""
    return workspace.redactor().redact_value(_rounded(fenced_answer(result)))


def _rounded(value: Any) -> Any:
    """Rounds floats to 6 significant digits, since every digit costs tokens."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def output_schema(operation: Operation) -> dict[str, Any]:
    """Returns the JSON schema of what `structured_content` returns; its root is an object.

    It describes the operation's result or, if the call becomes a run, the report of the run.
    """
    (reference,), definitions = msgspec.json.schema_components(
        [operation.result], ref_template=_REF
    )
    schema: dict[str, Any] = definitions.pop(reference["$ref"].removeprefix("#/$defs/"))
    properties = dict(schema["properties"])
    required = list(schema["required"])
    if operation.may_become_run:
        (run_reference,), run_definitions = msgspec.json.schema_components(
            [RunReport], ref_template=_REF
        )
        report: dict[str, Any] = run_definitions.pop(run_reference["$ref"].removeprefix("#/$defs/"))
        schema["anyOf"] = [{"required": required}, {"required": report["required"]}]
        definitions |= run_definitions
        properties |= report["properties"]
        required = []
    if operation.result is RunReport or operation.may_become_run:
        properties["poll_after_s"] = {"anyOf": [{"type": "number"}, {"type": "null"}]}
    if operation.result is RunReport:
        required.append("poll_after_s")
    properties["next_step"] = {"type": "string"}
    required.append("next_step")
    schema |= {"properties": properties, "required": required}
    return {**schema, "$defs": definitions} if definitions else schema


def input_schema(operation: Operation, *, listed: Collection[str]) -> dict[str, Any]:
    """Returns the JSON schema of the request, shortened to what a calling model needs.

    Descriptions that another `listed` tool already contains are left out.
    """
    schema = _schema_of(operation.request)
    explaining = (
        name for name in listed if operation_named(name).request is operation.explained_by
    )
    if operation.explained_by is not None and any(explaining):
        explained = _schema_of(operation.explained_by)["properties"]
        schema["properties"] = {
            name: _without_description(option) if option == explained.get(name) else option
            for name, option in schema["properties"].items()
        }
    return schema


def _schema_of(request: type[BaseModel]) -> dict[str, Any]:
    schema: dict[str, Any] = request.model_json_schema()
    schema.pop("description", None)
    return _shortened(schema)


def _without_description(option: dict[str, Any]) -> dict[str, Any]:
    """Returns an option's schema without its description, choices, limits and default."""
    left_out = ("description", "enum", "minimum", "maximum", "minLength", "default")
    return {key: value for key, value in option.items() if key not in left_out}


def _shortened(value: Any) -> Any:
    """Returns a schema without titles, nulls, minimums of 0 or 1, and false or [] defaults.

    A calling model does not need them; validation still applies all of them.
    """
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if not isinstance(value, dict):
        return value
    # A property may be called title, so only a string under this key is a title.
    plain = {
        key: _shortened(inner)
        for key, inner in value.items()
        if not (key == "title" and isinstance(inner, str))
        and not (key == "default" and (inner is False or inner == []))
        and not (key == "exclusiveMinimum" and inner == 0)
        and not (key == "minimum" and inner in (0, 1))
        and not (key == "minLength" and inner == 1)
    }
    choices = plain.get("anyOf")
    if isinstance(choices, list) and plain.get("default", "") is None:
        non_null = [choice for choice in choices if choice != {"type": "null"}]
        others = {key: inner for key, inner in plain.items() if key not in ("anyOf", "default")}
        return {**others, **non_null[0]} if len(non_null) == 1 else {**others, "anyOf": non_null}
    return plain


async def escape_unwritable_text(
    ctx: ServerRequestContext[Any, Any], call_next: CallNext
) -> HandlerResult:
    """Middleware that escapes characters of an answer that are not valid Unicode.

    A transport stops at the first answer that it cannot write, after which no call is answered. For
    example, JSON cannot contain a file name that is not UTF-8.
    """
    try:
        return json_safe(await call_next(ctx))
    except MCPError as error:
        raise MCPError(error.code, _escaped(error.message), json_safe(error.data)) from error


def json_safe(answer: Any) -> Any:
    """Returns an answer, or an escaped copy if it cannot be written as JSON.

    Raises MCPError if the copy cannot be written either.
    """
    try:
        pydantic_core.to_json(answer)
        return answer
    except (ValueError, RecursionError) as error:
        reason = type(error).__name__
    try:
        escaped = _escaped(answer)
        pydantic_core.to_json(escaped)
    except (ValueError, RecursionError):
        raise MCPError(
            INTERNAL_ERROR, f"the server's result cannot be written as JSON ({reason})"
        ) from None
    return escaped


def _escaped(value: Any) -> Any:
    """Returns a value whose strings are valid UTF-8; other characters become escapes."""
    match value:
        case str():
            return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
        case BaseModel():
            return _escaped(value.model_dump(by_alias=True, exclude_none=True))
        case dict():
            return {_escaped(key): _escaped(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_escaped(inner) for inner in value]
        case _:
            return value

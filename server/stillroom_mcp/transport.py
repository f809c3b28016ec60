"""Makes sure that each answer can be written as JSON, over whichever transport it goes out."""

from typing import Any

import pydantic_core
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR
from pydantic import BaseModel


async def writable_answers(
    ctx: ServerRequestContext[Any, Any], call_next: CallNext
) -> HandlerResult:
    """Passes a request on, and its answer back with escapes for what is no Unicode.

    A transport ends at the first answer that it cannot write, and then no call is answered any
    more. A file's name that is not UTF-8, for one, is a text that JSON cannot hold.
    """
    try:
        return writable(await call_next(ctx))
    except MCPError as error:
        raise MCPError(error.code, _escaped(error.message), writable(error.data)) from error


def writable(answer: Any) -> Any:
    """Returns an answer that can be written as JSON: itself, or a copy with escapes.

    Raises MCPError if it cannot be written at all.
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
        raise MCPError(INTERNAL_ERROR, f"the answer is no JSON ({reason})") from None
    return escaped


def _escaped(value: Any) -> Any:
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

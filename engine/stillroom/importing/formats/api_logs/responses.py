"""Logs of OpenAI's Responses: stored responses with their input items, and logged pairs.

What a response continues is put before it (`bodies/response_chains.py`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stillroom.importing.bodies.envelopes import (
    LoggedPair,
    envelope_facts,
    find_pair,
    is_of_another_tool,
    logged_calls,
)
from stillroom.importing.bodies.exchanges import NO_REPLY, NO_REQUEST
from stillroom.importing.bodies.facts import as_list, as_row, parsed
from stillroom.importing.bodies.response_chains import ResponseChains
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    has_row,
    read_json_rows,
)
from stillroom.importing.records import Refusal, SourceRow, TraceFormat


def _is_call(row: Row) -> bool:
    if is_of_another_tool(row):
        return False
    if row.get("object") == "response":
        return True
    pair = find_pair(row)
    if pair is None or pair.api != "responses":
        return False
    is_response = as_row(pair.response).get("object") == "response"
    return is_response or bool(pair.path) or "model" in pair.request


def _pair_of(row: Row) -> LoggedPair | None:
    """Returns the request and the response of a row.

    A stored response repeats most of its request; what it was sent stands beside it as
    `input_items`, or as `input`.
    """
    response = as_row(parsed(row.get("response")))
    stored = row if row.get("object") == "response" else response
    items = parsed(row.get("input_items", row.get("input", stored.get("input"))))
    if stored and not as_row(parsed(row.get("request"))) and items is not None:
        listed = as_list(as_row(items).get("data")) if isinstance(items, dict) else items
        request = {key: stored.get(key) for key in _REPEATED if stored.get(key) is not None}
        envelope = {} if stored is row else {k: row[k] for k in row if k not in _BODIES}
        return LoggedPair(request | {"input": _oldest_first(listed)}, stored, envelope)
    return None if stored is row else find_pair(row)


_REPEATED = ("model", "instructions", "tools", "previous_response_id", "conversation")
_BODIES = ("response", "input_items", "input")


def _oldest_first(items: Any) -> Any:
    """Returns items in the order in which they were sent; the API lists the newest first."""
    if not isinstance(items, list):
        return items
    called: set[Any] = set()
    for item in map(as_row, as_list(items)):
        if item.get("type") == "function_call":
            called.add(item.get("call_id"))
        elif item.get("type") == "function_call_output" and item.get("call_id") not in called:
            later = (as_row(other) for other in as_list(items))
            is_called = any(
                other.get("type") == "function_call" and other.get("call_id") == item["call_id"]
                for other in later
                if "call_id" in item
            )
            return as_list(items)[::-1] if is_called else items
    return items


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    with ResponseChains(lambda: _pairs(paths)) as chains:
        yield from convert_rows(paths, lambda row: _calls(row, chains))


def _pairs(paths: Sequence[Path]) -> Iterator[LoggedPair]:
    for path in paths:
        for row in read_json_rows(path):
            if not isinstance(row, Refusal) and (pair := _pair_of(row.data)) is not None:
                yield pair


def _calls(row: JsonRow, chains: ResponseChains) -> Iterator[SourceRow]:
    pair = _pair_of(row.data)
    if pair is None:
        if row.data.get("object") == "response" or as_row(row.data.get("response")):
            detail = "add its input items to the row as `input_items`"
            raise UnreadableRowError("a response without its input", detail)
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` with the request's body")
    if pair.response is None:
        raise UnreadableRowError(NO_REPLY, "the row has no `response`")
    exchange, known = chains.exchange(pair)
    facts = envelope_facts(pair.envelope) | known
    yield from logged_calls(row.place, [exchange], facts, {}, "openai")


OPENAI_RESPONSES = TraceFormat(
    name="openai_responses",
    title="OpenAI Responses: stored responses, or requests and responses",
    is_recognised=has_row(_is_call),
    read=_read,
)

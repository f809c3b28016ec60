"""Finds the request and the response of a call in a row that somebody's code or proxy logged."""

from dataclasses import dataclass
from typing import Any, Literal

from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_time,
    parsed,
    positive_number,
    seconds_between,
    without_nothing,
)
from stillroom.importing.payloads.streams import unstreamed

Api = Literal["chat", "responses", "anthropic"]
_REQUESTS = ("request", "request_body", "requestBody", "params", "kwargs")
_RESPONSES = ("response", "response_body", "responseBody", "completion", "message", "result")
_BEGINNINGS = ("started_at", "start_time", "startTime", "timestamp", "created_at", "time")
_ENDS = ("ended_at", "end_time", "endTime", "finished_at", "completed_at")
_SESSIONS = (
    "session_id", "sessionId", "conversation_id", "conversationId", "thread_id", "group_id",
    "chat_id", "session", "conversation", "thread",
)  # fmt: skip
_MARKS = frozenset(
    {
        "stillroom_record",
        "custom_id",
        "call_type",
        "custom_llm_provider",
        "run_type",
        "traceId",
        "request_created_at",
        "responses_create_params",
        "resourceSpans",
    }
)
"""Fields of our recordings, batches, LiteLLM, LangSmith, Langfuse, Helicone, NeMo Gym and OTLP."""
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "image", "document"})


@dataclass(frozen=True, slots=True)
class LoggedPair:
    """A request and its response with the row in which they stand."""

    request: Row
    response: Any
    envelope: Row
    """The rest of the row."""
    path: str = ""
    """The path or address that was called, as far as the row says it."""

    @property
    def api(self) -> Api:
        """The API that was called, judged by the bodies."""
        return api_of(self.request, self.response, self.path)


def is_of_another_tool(row: Row) -> bool:
    """Returns whether a row with a request and a response is that of a tool with its own reader."""
    return not _MARKS.isdisjoint(row)


def find_pair(row: Row) -> LoggedPair | None:
    """Returns the request and the response that a row holds; None if it holds no request.

    Bodies may be JSON text, and may stand under `body` with headers and an address. The fields of
    the request may also stand in the row itself, next to the response.
    """
    name = next((name for name in _REQUESTS if as_row(parsed(row.get(name)))), None)
    answer = next((name for name in _RESPONSES if row.get(name) not in (None, "")), None)
    if name is None:
        is_flat = answer is not None and ("messages" in row or "input" in row)
        if not is_flat:
            return None
        rest = {key: row[key] for key in row if key in (*_BEGINNINGS, *_ENDS, *_SESSIONS, "id")}
        request, path = row, ""
    else:
        whole = as_row(parsed(row[name]))
        request = as_row(parsed(whole.get("body"))) or whole
        path = first_text(whole, "path", "url", "endpoint") or ""
        rest = {key: item for key, item in row.items() if key not in (name, answer)}
    path = path or first_text(row, "path", "url", "endpoint") or ""
    return LoggedPair(request, _response_body(row, answer), rest, path)


def _response_body(row: Row, name: str | None) -> Any:
    if name is None:
        return {"error": row["error"]} if row.get("error") else None
    response = parsed(row[name])
    body = parsed(as_row(response).get("body"))
    whole = body or response
    try:
        return unstreamed(whole)
    except UnreadableRowError:
        return whole  # it is refused when it is read


def api_of(request: Row, response: Any = None, path: str = "") -> Api:
    """Returns the API to which a request and its response belong; chat completions in doubt."""
    reply = as_row(response)
    if "choices" in reply:
        return "chat"
    if reply.get("object") == "response" or isinstance(reply.get("output"), list):
        return "responses"
    if reply.get("type") == "message" and reply.get("role") == "assistant":
        return "anthropic"
    if path:
        ends = {"/responses": "responses", "/messages": "anthropic", "/completions": "chat"}
        plain = path.partition("?")[0].rstrip("/")
        for end, api in ends.items():
            if plain.endswith(end):
                return api  # pyright: ignore[reportReturnType]
    if "messages" not in request:
        return "responses" if "input" in request else "chat"
    return "anthropic" if _looks_like_anthropic(request) else "chat"


def _looks_like_anthropic(request: Row) -> bool:
    if "system" in request or "anthropic_version" in request or "stop_sequences" in request:
        return True
    if any("input_schema" in as_row(tool) for tool in as_list(request.get("tools"))):
        return True
    blocks = (
        as_row(block).get("type")
        for message in as_list(request.get("messages"))
        for block in as_list(as_row(message).get("content"))
    )
    return any(isinstance(kind, str) and kind in _ANTHROPIC_BLOCKS for kind in blocks)


def envelope_facts(envelope: Row) -> Row:
    """Returns what the other fields of the row say, as fields of a logged conversation."""
    begin = next((envelope[name] for name in _BEGINNINGS if envelope.get(name)), None)
    end = next((envelope[name] for name in _ENDS if envelope.get(name)), None)
    seconds = positive_number(envelope.get("duration_s"))
    for name in ("duration_ms", "latency_ms", "delay_ms"):
        if seconds is None and (number := positive_number(envelope.get(name))) is not None:
            seconds = number / 1000
    known = without_nothing(
        id=first_text(envelope, "id", "request_id", "call_id"),
        group=first_text(envelope, *_SESSIONS)
        or first_text(as_row(envelope.get("metadata")), *_SESSIONS),
        started_at=iso_time(begin),
    )
    if seconds is None:
        seconds = seconds_between(begin, end)
    cost = decimal_number(envelope.get("cost_usd", envelope.get("cost")))
    return known | {
        name: number
        for name, number in (("duration_s", seconds), ("cost_usd", cost))
        if number is not None
    }


def envelope_metadata(envelope: Row) -> Row:
    """Returns what the other fields of the row hold of no fixed meaning."""
    return without_nothing(
        metadata=as_row(envelope.get("metadata")), tags=as_list(envelope.get("tags"))
    )

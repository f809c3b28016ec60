"""Reads exported traces and spans of OpenAI's Agents SDK, one or several per row."""

from collections.abc import Iterator
from dataclasses import replace

from stillroom.importing.formats.sessions.message_tree import HISTORY_DROPPED
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    listed_rows,
    make_row_reader,
)
from stillroom.importing.payloads.calls import NO_CALL, ApiCall, logged_calls, read_calls
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    first_text,
    iso_time,
    seconds_between,
    usage_of,
    without_empty,
)
from stillroom.importing.records import RefusedRow, SourceRow, TraceFormat
from stillroom.importing.table_rows import detect_by_item

_NO_CONTENT = "a response span without its messages"
_HINT = (
    "the SDK exports only the response's id: let your exporter add span_data.input and "
    "span_data.response; see `stillroom docs traces`"
)


class _Traces:
    """Reads the calls in spans; stores the thread of each trace that was read."""

    def __init__(self) -> None:
        self._threads: dict[str, str] = {}

    def calls(self, row: JsonRow) -> Iterator[SourceRow]:
        """Yields the calls in a row: a span, a trace or a batch of them."""
        for item in listed_rows(row, "data", part=""):
            yield from convert_rows([item], self._calls)

    def _calls(self, row: JsonRow) -> Iterator[SourceRow]:
        item = row.data
        span, trace = as_row(item.get("span_data")), first_text(item, "trace_id")
        failure = first_text(as_row(item.get("error")), "message")
        match span.get("type"):
            case "generation":
                call = _generation(span, failure)
            case "response":
                call = _response(span, failure)
            case kind:
                trace, thread = first_text(item, "id"), first_text(item, "group_id")
                if trace and thread:
                    self._threads[trace] = thread
                yield RefusedRow(row.location, NO_CALL, str(kind or item.get("object")))
                return
        log_fields: Row = {
            "group": self._threads.get(trace or "", trace),
            "id": first_text(item, "id"),
            "started_at": iso_time(item.get("started_at")),
            "duration_s": seconds_between(item.get("started_at"), item.get("ended_at")),
        }
        parent_span = first_text(item, "parent_id")
        metadata = without_empty(response_id=call.id, parent_span=parent_span)
        provider = "openai" if span["type"] == "response" else None
        yield from logged_calls(
            row.location, [call], log_fields, metadata=metadata, provider=provider
        )


def _generation(span: Row, failure: str | None) -> ApiCall:
    """Returns the call of a span with chat messages.

    Raises UnreadableRowError if there are none.
    """
    request = {"messages": span.get("input"), "model": span.get("model")}
    output = as_list(span.get("output"))
    response: Row = {"choices": [{"message": output[-1]}]} if output else {}
    if not output and failure:
        response = {"error": {"message": failure}}
    (call,) = read_calls(request, response)
    return replace(call, usage=usage_of(span.get("usage")))


def _response(span: Row, failure: str | None) -> ApiCall:
    """Returns the call of a span to which the user's exporter added input and response.

    Raises UnreadableRowError if they are missing.
    """
    response = as_row(span.get("response"))
    sent = span.get("input")
    if sent is None or not (response or failure):
        raise UnreadableRowError(_NO_CONTENT, _HINT)
    repeated = ("instructions", "model", "tools")
    request = {key: response[key] for key in repeated if response.get(key)} | {"input": sent}
    (call,) = read_calls(request, response or {"error": {"message": failure}})
    if response.get("previous_response_id") or response.get("conversation"):
        return replace(call, dropped=(HISTORY_DROPPED, *call.dropped))
    return call


def _is_item(row: Row) -> bool:
    is_trace = row.get("object") == "trace" and "workflow_name" in row
    return is_trace or (row.get("object") == "trace.span" and "span_data" in row)


OPENAI_AGENTS = TraceFormat(
    name="openai_agents",
    title="Traces of OpenAI's Agents SDK",
    is_recognised=detect_by_item(_is_item, "data"),
    read=make_row_reader(_Traces().calls),
)

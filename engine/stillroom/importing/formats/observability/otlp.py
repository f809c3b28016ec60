"""Parses spans, log records and evaluation results of OTLP JSON."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from stillroom import bounds
from stillroom.data.checks import as_number
from stillroom.importing.json_rows import Row
from stillroom.importing.payloads.calls import ApiCall
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    parse_if_json,
    text_of,
    usage_details,
    usage_of,
)
from stillroom.importing.payloads.messages import MessageReader
from stillroom.importing.records import Feedback, Location, RefusedRow, feedback_row

_VALUES = ("stringValue", "boolValue", "doubleValue", "bytesValue")
_MAX_LEVELS = bounds.SPAN_LEVELS.limit
EVALUATION = "gen_ai.evaluation.result"
_NAME, _SCORE = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"
_LABEL = "gen_ai.evaluation.score.label"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """An event of a span."""

    name: str
    fields: Row
    """The attributes, and the fields of the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedEvent(SpanEvent):
    """A log record as an event of its span, with the location of the record."""

    location: Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span, with attribute values as plain JSON."""

    location: Location
    trace_id: str
    id: str
    name: str = ""
    attributes: Row = field(default_factory=dict[str, Any])
    resource: Row = field(default_factory=dict[str, Any])
    """The attributes of its resource, such as `service.name`."""
    events: tuple[SpanEvent, ...] = ()
    begin: Any = None
    end: Any = None
    error: str | None = None
    """The error with which it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One log record, with the ids of its span and trace."""

    trace_id: str
    span_id: str
    event: SpanEvent
    location: Location


def telemetry_of(row: Row, location: Location) -> Iterator[Span | LogRecord]:
    """Yields the spans and log records in a row."""
    for group in _list_field(row, "resourceSpans", "resource_spans"):
        resource = attributes_of(as_row(as_row(group).get("resource")))
        for scope in _list_field(as_row(group), "scopeSpans", "scope_spans"):
            for span in as_list(as_row(scope).get("spans")):
                yield _span(as_row(span), location, resource)
    for group in _list_field(row, "resourceLogs", "resource_logs"):
        for scope in _list_field(as_row(group), "scopeLogs", "scope_logs"):
            for number, record in enumerate(
                _list_field(as_row(scope), "logRecords", "log_records")
            ):
                yield _log_record(as_row(record), location, number)


def attributes_of(value: Row) -> Row:
    """Returns the attributes of a span, event or resource as plain values."""
    attributes = value.get("attributes")
    if isinstance(attributes, dict):
        return cast("Row", attributes)
    return {
        key: plain_value(as_row(item).get("value"))
        for item in as_list(attributes)
        if (key := text_of(as_row(item).get("key"))) is not None
    }


def plain_value(value: Any, levels: int = _MAX_LEVELS) -> Any:
    """Converts a typed OTLP value to plain JSON; parts that are nested too deeply become None."""
    fields = as_row(value)
    for name in _VALUES:
        if name in fields:
            return fields[name]
    if "intValue" in fields:
        number = fields["intValue"]
        try:
            return int(number)
        except (TypeError, ValueError):
            return None
    if levels == 0:
        return None
    if "arrayValue" in fields:
        values = as_list(as_row(fields["arrayValue"]).get("values"))
        return [plain_value(item, levels - 1) for item in values]
    if "kvlistValue" in fields:
        pairs = map(as_row, as_list(as_row(fields["kvlistValue"]).get("values")))
        return {
            pair["key"]: plain_value(pair.get("value"), levels - 1)
            for pair in pairs
            if isinstance(pair.get("key"), str)
        }
    return None


def attribute_tree(attributes: Row, prefix: str) -> Any:
    """Returns the attributes below a prefix as a tree, e.g. `p.0.role` as `[{"role": …}]`.

    Objects with only numeric keys become lists. An attribute named by the prefix itself is parsed
    as JSON. Returns None if there are no such attributes.
    """
    value = parse_if_json(attributes.get(prefix))
    if value is not None and not isinstance(value, str):
        return value
    tree: Row = {}
    start = prefix + "."
    for key, value in attributes.items():
        if not key.startswith(start):
            continue
        node = tree
        *parents, last = key[len(start) :].split(".", _MAX_LEVELS)
        for name in parents:
            child = node.get(name)
            if not isinstance(child, dict):
                child = node[name] = {}
            node = cast("Row", child)
        node.setdefault(last, value)
    return _as_lists(tree) if tree else None


def _as_lists(node: Any) -> Any:
    """Converts objects with only numeric keys in a tree to lists."""
    if not isinstance(node, dict):
        return node
    fields = {key: _as_lists(value) for key, value in cast("Row", node).items()}
    if all(key.isdecimal() and key.isascii() for key in fields):
        return [fields[key] for key in sorted(fields, key=lambda key: (len(key), key))]
    return fields


def flat_attributes(attributes: Row, prefix: str = "", levels: int = _MAX_LEVELS) -> Row:
    """Flattens nested objects to attributes with dotted names."""
    flat: Row = {}
    for key, value in attributes.items():
        if isinstance(value, dict) and value and levels:
            flat |= flat_attributes(cast("Row", value), f"{prefix}{key}.", levels - 1)
        else:
            flat[prefix + key] = value
    return flat


def _list_field(row: Row, name: str, other: str) -> list[Any]:
    """Returns the list in a field, which may have either of two names; empty if there is none."""
    return as_list(row.get(name, row.get(other)))


def _span(span: Row, location: Location, resource: Row) -> Span:
    """Parses a span of OTLP JSON."""
    span_id = first_text(span, "spanId", "span_id") or ""
    return Span(
        location=Location(location.path, location.line, span_id),
        trace_id=first_text(span, "traceId", "trace_id") or "",
        id=span_id,
        name=text_of(span.get("name")) or "",
        attributes=attributes_of(span),
        resource=resource,
        events=tuple(_events(span)),
        begin=_seconds_from_nanoseconds(
            span.get("startTimeUnixNano", span.get("start_time_unix_nano"))
        ),
        end=_seconds_from_nanoseconds(span.get("endTimeUnixNano", span.get("end_time_unix_nano"))),
        error=_failure(as_row(span.get("status")), span),
    )


def span_with_context(span: Row, location: Location) -> Span:
    """Parses a span with a `context`, the format of Phoenix's API and of console exporters."""
    context = as_row(span["context"])
    span_id = text_of(context.get("span_id")) or ""
    status = as_row(span.get("status"))
    code = status.get("status_code", span.get("status_code"))
    message = first_text(span, "status_message") or first_text(status, "description")
    return Span(
        location=Location(location.path, location.line, span_id),
        trace_id=text_of(context.get("trace_id")) or "",
        id=span_id,
        name=text_of(span.get("name")) or "",
        attributes=flat_attributes(as_row(span["attributes"])),
        resource=as_row(as_row(span.get("resource")).get("attributes")),
        events=tuple(_events(span)),
        begin=span.get("start_time"),
        end=span.get("end_time"),
        error=_failure({"code": code, "message": message}, span),
    )


def _seconds_from_nanoseconds(value: Any) -> float | None:
    """Converts nanoseconds to seconds, rounded to microseconds; None for another value."""
    try:
        number = int(value) if isinstance(value, str) else as_number(value)
    except ValueError:
        return None
    return None if number is None else round(number / 1000) / 1e6


def _events(span: Row) -> Iterator[SpanEvent]:
    for event in map(as_row, as_list(span.get("events"))):
        yield SpanEvent(name=text_of(event.get("name")) or "", fields=attributes_of(event))


def _failure(status: Row, span: Row) -> str | None:
    """Returns the error of a span whose status is an error; None for any other span."""
    if status.get("code") not in (2, "STATUS_CODE_ERROR", "ERROR"):
        return None
    exceptions = (attributes_of(as_row(event)) for event in as_list(span.get("events")))
    texts = (first_text(fields, "exception.message", "exception.type") for fields in exceptions)
    return text_of(status.get("message")) or next((text for text in texts if text), "unknown")


def _log_record(record: Row, location: Location, number: int) -> LogRecord:
    """Parses a log record of OTLP JSON."""
    fields = attributes_of(record)
    body = plain_value(record.get("body"))
    name = first_text(record, "eventName", "event_name") or first_text(fields, "event.name") or ""
    span_id = first_text(record, "spanId", "span_id") or ""
    record_location = Location(location.path, location.line, f"{span_id or 'record'}.{number}")
    body_fields = as_row(parse_if_json(body)) or ({"body": body} if body is not None else {})
    return LogRecord(
        trace_id=first_text(record, "traceId", "trace_id") or "",
        span_id=span_id,
        event=SpanEvent(name=name, fields=fields | body_fields),
        location=record_location,
    )


def evaluation_results(span: Span) -> Iterator[Feedback | RefusedRow]:
    """Yields the evaluation results in the events of a span."""
    for number, event in enumerate(span.events):
        if event.name == EVALUATION:
            part = f"{span.id} event {number}"
            yield _evaluation_result(
                event, Location(span.location.path, span.location.line, part), span.id
            )


def evaluation_result_of(record: LogRecord) -> Feedback | RefusedRow:
    """Returns the evaluation result in a log record, about the span or response that it names."""
    response_id = first_text(record.event.fields, "gen_ai.response.id")
    return _evaluation_result(
        record.event, record.location, record.span_id or response_id or record.trace_id
    )


def _evaluation_result(
    event: SpanEvent, location: Location, target_id: str
) -> Feedback | RefusedRow:
    """Returns the feedback in an evaluation event."""
    fields = event.fields
    name, score = first_text(fields, _NAME), decimal_number(fields.get(_SCORE))
    return feedback_row(location, target_id, name, score, fields.get(_LABEL))


_BLOCK_KINDS = frozenset(
    {
        "text",
        "image_url",
        "image",
        "input_text",
        "input_image",
        "tool_use",
        "tool_result",
        "thinking",
    }
)


@dataclass(frozen=True, slots=True)
class Convention:
    """A convention for model calls in the attributes of spans."""

    is_followed: Callable[[Span], bool]
    """Returns whether a span follows the convention."""
    is_model_call: Callable[[Span], bool]
    read_call: Callable[[Span], Iterator[ApiCall]]
    """Yields the calls of a span, one per choice. Raises UnreadableRowError if the span has no
    messages."""


def span_call(messages: list[Row], *, usage: Row, **fields: Any) -> ApiCall:
    """Returns a call with these messages and `fields`; `usage` is an API's usage object."""
    return ApiCall(
        messages=messages, usage=usage_of(usage), metadata=dict(usage_details(usage)), **fields
    )


def read_messages(value: Any, reader: MessageReader) -> list[Row]:
    """Converts messages; contents that are JSON text are parsed as blocks.

    Parts of one turn that were logged as separate messages are joined. Raises UnreadableRowError
    if the value is not a list of messages.
    """
    if isinstance(value, list):
        value = [_with_blocks(item) for item in as_list(value)]
    return join_turns(reader.turns(value))


def join_turns(messages: list[Row]) -> list[Row]:
    """Joins successive assistant messages that have the parts of one turn into one message."""
    joined: list[Row] = []
    for message in messages:
        last = joined[-1] if joined else {"role": ""}
        if message["role"] == last["role"] == "assistant" and _continues(last, message):
            text = message["content"] or last["content"]
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            joined[-1] = (
                last | message | {"content": text} | ({"tool_calls": calls} if calls else {})
            )
        else:
            joined.append(message)
    return joined


def _continues(last: Row, message: Row) -> bool:
    """Returns whether an assistant message belongs to the turn of the one before it."""
    if message.get("reasoning_content"):
        return not last["content"] and "tool_calls" not in last
    return not (message["content"] and last["content"])


def _with_blocks(item: Any) -> Any:
    """Returns a message, with its content parsed if that is the JSON text of blocks."""
    message = as_row(item)
    content = message.get("content")
    if not isinstance(content, str):
        return item
    blocks = as_list(parse_if_json(content))
    kinds = [as_row(block).get("type") for block in blocks]
    is_blocks = bool(kinds) and all(
        isinstance(kind, str) and kind in _BLOCK_KINDS for kind in kinds
    )
    return message | {"content": blocks} if is_blocks else item

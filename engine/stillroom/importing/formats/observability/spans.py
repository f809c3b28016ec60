"""Reads spans: OpenTelemetry, OpenInference, OpenRouter's broadcast, Phoenix, tables of spans.

The spans of a trace may be far apart or in several files. So a first pass collects
the sessions and messages that calls need from other spans and from log records.

Source: OTLP JSON; Phoenix's `GET /v1/projects/{project}/spans` and `/span_annotations`, and the
columns of its client's `get_spans_dataframe()`, such as `context.span_id` and
`attributes.llm.input_messages`; the columns of Logfire's `records` and of the OpenTelemetry
collector's ClickHouse exporter (`otel_traces`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stillroom.data.checks import as_number
from stillroom.importing.formats.observability.ai_sdk import AI_SDK
from stillroom.importing.formats.observability.genai import EVENT_NAMES, GENAI, OPENROUTER_SPANS
from stillroom.importing.formats.observability.openinference import KIND, OPENINFERENCE
from stillroom.importing.formats.observability.otlp import (
    EVALUATION,
    LocatedEvent,
    LogRecord,
    Span,
    SpanEvent,
    evaluation_result_of,
    evaluation_results,
    flat_attributes,
    span_with_context,
    telemetry_of,
)
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    listed_rows,
)
from stillroom.importing.payloads.calls import NO_CALL, NO_REPLY, ApiCall, logged_calls
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_seconds,
    iso_time,
    parse_if_json,
    seconds_between,
    without_empty,
)
from stillroom.importing.records import (
    Feedback,
    Location,
    RefusedRow,
    SourceRow,
    TraceFormat,
    feedback_row,
)
from stillroom.importing.spill import DiskDict
from stillroom.importing.table_rows import detect_by_item, read_any_rows

_SESSIONS = ("session.id", "langfuse.session.id", "ai.telemetry.metadata.sessionId")
_CONVERSATION = "gen_ai.conversation.id"
_RESPONSE = "gen_ai.response.id"
_AMBIGUOUS = ""
_CONVENTIONS = (OPENINFERENCE, OPENROUTER_SPANS, AI_SDK, GENAI)
_HEAD_LOCATION = Location(Path(), 1)


Telemetry = Span | LogRecord | Feedback | RefusedRow
TelemetryOf = Callable[[JsonRow], Iterator[Telemetry]]


@dataclass(slots=True)
class _Context:
    """The sessions and messages that calls need from other spans and from log records."""

    records: DiskDict[tuple[str, int]]
    """The log records with messages, by span id and number within the span."""
    num_records: dict[str, int] = field(default_factory=dict[str, int])
    sessions: dict[str, str] = field(default_factory=dict[str, str])
    """The session of each trace, if it has one."""
    conversations: dict[str, str] = field(default_factory=dict[str, str])
    """The conversation of each trace, if it has one; `_AMBIGUOUS` if its spans name several."""

    def group_of(self, span: Span) -> str | None:
        """Returns the session or conversation of a span, or else of its trace."""
        group = first_text(span.attributes, *_SESSIONS, _CONVERSATION)
        trace_groups = (self.sessions.get(span.trace_id), self.conversations.get(span.trace_id))
        return group or next((group for group in trace_groups if group), None)

    def add_span(self, span: Span) -> None:
        """Stores the session and the conversation of a span."""
        if session := first_text(span.attributes, *_SESSIONS):
            self.sessions.setdefault(span.trace_id, session)
        if conversation := first_text(span.attributes, _CONVERSATION):
            first = self.conversations.setdefault(span.trace_id, conversation)
            if first != conversation:
                self.conversations[span.trace_id] = _AMBIGUOUS


def read_spans(paths: Sequence[Path], telemetry_of: TelemetryOf) -> Iterator[SourceRow]:
    """Yields the calls and feedback in files, and a RefusedRow for each span that is not a call.

    `telemetry_of` yields the spans, log records and feedback in a row, or a RefusedRow.
    """
    with DiskDict[tuple[str, int]]() as records:
        context = _Context(records)
        _collect(paths, telemetry_of, context)
        joined_spans: set[str] = set()
        for item in _telemetry(paths, telemetry_of):
            if isinstance(item, Span):
                yield from _rows_of(item, context, joined_spans, paths)
                yield from evaluation_results(item)
            elif not isinstance(item, LogRecord):
                yield item
            elif item.event.name == EVALUATION:
                yield evaluation_result_of(item)
            elif not _has_messages(item):
                yield RefusedRow(item.location, NO_CALL, "a log record without messages")
        for span_id, number in records:
            if span_id not in joined_spans:
                event = _stored_event(context, (span_id, number), paths)
                yield RefusedRow(event.location, "a message without its span", f"span {span_id!r}")


def _has_messages(record: LogRecord) -> bool:
    return record.event.name in EVENT_NAMES and bool(record.span_id)


def _telemetry(paths: Sequence[Path], telemetry_of: TelemetryOf) -> Iterator[Telemetry]:
    """Yields the spans, log records and feedback in files."""
    for row in read_any_rows(*paths):
        if isinstance(row, RefusedRow):
            yield row
        else:
            yield from telemetry_of(row)


def _collect(paths: Sequence[Path], telemetry_of: TelemetryOf, context: _Context) -> None:
    """Adds the sessions and messages in files to the context."""
    for item in _telemetry(paths, telemetry_of):
        if isinstance(item, Span):
            context.add_span(item)
        elif isinstance(item, LogRecord) and _has_messages(item):
            number = context.num_records.get(item.span_id, 0)
            context.num_records[item.span_id] = number + 1
            location = [paths.index(item.location.path), item.location.line, item.location.part]
            context.records.add(
                (item.span_id, number), [item.event.name, item.event.fields, location]
            )


def _otlp_telemetry(row: JsonRow) -> Iterator[Telemetry]:
    telemetry = list(telemetry_of(row.data, row.location))
    yield from telemetry or [RefusedRow(row.location, "neither spans nor log records")]


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    return read_spans(paths, _otlp_telemetry)


def _stored_event(context: _Context, key: tuple[str, int], paths: Sequence[Path]) -> LocatedEvent:
    name, fields, (number, line, part) = context.records.get(key)
    return LocatedEvent(name=name, fields=fields, location=Location(paths[number], line, part))


def _rows_of(
    span: Span, context: _Context, joined_spans: set[str], paths: Sequence[Path]
) -> Iterator[SourceRow]:
    """Yields the calls of a span, or the span and its log records as refused rows."""
    convention = next(each for each in _CONVENTIONS if each.is_followed(span))
    if not convention.is_model_call(span):
        yield RefusedRow(span.location, NO_CALL, span.name)
        return
    num_records = 0 if span.id in joined_spans else context.num_records.get(span.id, 0)
    records = [_stored_event(context, (span.id, number), paths) for number in range(num_records)]
    joined_spans.update([span.id] if records else [])
    locations = tuple(record.location for record in records)
    span = replace(span, events=(*span.events, *records))
    try:
        calls = [_add_failure(call, span) for call in convention.read_call(span)]
    except UnreadableRowError as error:
        yield RefusedRow(span.location, error.reason, error.detail)
        for location in locations:
            yield RefusedRow(location, error.reason, f"see {span.location}")
        return
    feedback_ids = (span.trace_id, first_text(span.attributes, _RESPONSE))
    log_fields: Row = {
        "group": context.group_of(span),
        "id": span.id or None,
        "feedback_ids": tuple(name for name in feedback_ids if name),
        "started_at": iso_time(span.begin),
        "duration_s": seconds_between(span.begin, span.end),
    }
    metadata = without_empty(trace_id=span.trace_id)
    yield from logged_calls(
        span.location, calls, log_fields, metadata=metadata, part=span.id, merged_from=locations
    )


def _add_failure(call: ApiCall, span: Span) -> ApiCall:
    """Adds the span's error to a call without a reply. Raises UnreadableRowError if it has none."""
    if call.messages[-1]["role"] == "assistant":
        return call
    if not span.error:
        raise UnreadableRowError(NO_REPLY, "the span has no output messages")
    return replace(call, error=span.error)


def _convention_of(head: bytes) -> str | None:
    """Returns the convention that the first spans of an OTLP file follow; None for other files.

    If the first spans are not model calls, it is `otel_genai`, whose reader accepts spans of all
    conventions.
    """
    is_otlp = any(
        isinstance(row.get(name), list)
        for row in head_rows(head)
        for name in ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
    )
    if not is_otlp:
        return None
    items = (item for row in head_rows(head) for item in telemetry_of(row, _HEAD_LOCATION))
    spans = [item for item in items if isinstance(item, Span)]
    if any(OPENROUTER_SPANS.is_followed(span) for span in spans):
        return "openrouter"
    return (
        "openinference" if any(OPENINFERENCE.is_followed(span) for span in spans) else "otel_genai"
    )


OTEL_GENAI = TraceFormat(
    name="otel_genai",
    title="OpenTelemetry GenAI spans and log records (OTLP JSON)",
    is_recognised=lambda _path, head: _convention_of(head) == "otel_genai",
    read=_read,
)
OPENINFERENCE_SPANS = TraceFormat(
    name="openinference",
    title="OpenInference spans (OTLP JSON)",
    is_recognised=lambda _path, head: _convention_of(head) == "openinference",
    read=_read,
)
OPENROUTER = TraceFormat(
    name="openrouter",
    title="OpenRouter's broadcast to a bucket or collector (OTLP JSON)",
    is_recognised=lambda _path, head: _convention_of(head) == "openrouter",
    read=_read,
)


_ATTRIBUTE = "attributes."


def _is_span(row: Row) -> bool:
    context = as_row(row.get("context"))
    return (
        "span_id" in context and "trace_id" in context and isinstance(row.get("attributes"), dict)
    )


def _is_table_row(row: Row) -> bool:
    return "context.span_id" in row and any(key.startswith(_ATTRIBUTE) for key in row)


def _is_annotation(row: Row) -> bool:
    return "annotator_kind" in row and ("result" in row or "result.score" in row)


def _is_phoenix(row: Row) -> bool:
    return _is_span(row) or _is_table_row(row) or _is_annotation(row)


def _phoenix_telemetry(page: JsonRow) -> Iterator[Span | Feedback | RefusedRow]:
    """Yields the spans and annotations in a row."""
    for row in listed_rows(page, "data"):
        item, location = row.data, row.location
        if _is_annotation(item):
            yield _annotation(item, location)
            continue
        span = _from_columns(item) if _is_table_row(item) else item
        if not _is_span(span):
            yield RefusedRow(location, "neither a span nor an annotation")
            continue
        kind = {KIND: span["span_kind"]} if "span_kind" in span else {}
        yield span_with_context(span | {"attributes": kind | as_row(span["attributes"])}, location)
        for annotation in as_list(span.get("annotations")):
            span_id = as_row(span["context"]).get("span_id")
            yield _annotation({"span_id": span_id} | as_row(annotation), location)


def _from_columns(row: Row) -> Row:
    """Converts a row of the client's table to the API's format of a span."""
    attributes = {
        key.removeprefix(_ATTRIBUTE): value
        for key, value in row.items()
        if key.startswith(_ATTRIBUTE) and value is not None
    }
    context = {name: row.get(f"context.{name}") for name in ("span_id", "trace_id")}
    others = {
        key: value for key, value in row.items() if not key.startswith((_ATTRIBUTE, "context."))
    }
    return others | {"context": context, "attributes": attributes}


def _annotation(row: Row, location: Location) -> Feedback | RefusedRow:
    """Returns the feedback in an annotation of Phoenix."""
    target_id = first_text(row, "span_id", "trace_id", "session_id")
    name = first_text(row, "name", "annotation_name")
    result = as_row(row.get("result"))
    score = decimal_number(result.get("score", row.get("result.score")))
    return feedback_row(
        location, target_id, name, score, result.get("label", row.get("result.label"))
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """The names of the columns in a table of spans."""

    trace_id: str
    span_id: str
    attributes: str
    resource: str
    name: str
    begin: str
    end: str | None
    nanoseconds: str | None
    """The column of the duration, for tables without the end time."""
    status: str
    message: str


_LOGFIRE = _Columns(
    trace_id="trace_id",
    span_id="span_id",
    attributes="attributes",
    resource="otel_resource_attributes",
    name="span_name",
    begin="start_timestamp",
    end="end_timestamp",
    nanoseconds=None,
    status="otel_status_code",
    message="otel_status_message",
)
_CLICKHOUSE = _Columns(
    trace_id="TraceId",
    span_id="SpanId",
    attributes="SpanAttributes",
    resource="ResourceAttributes",
    name="SpanName",
    begin="Timestamp",
    end=None,
    nanoseconds="Duration",
    status="StatusCode",
    message="StatusMessage",
)


def _columns_of(row: Row) -> _Columns | None:
    for columns in (_LOGFIRE, _CLICKHOUSE):
        if all(name in row for name in (columns.trace_id, columns.span_id, columns.attributes)):
            return columns
    return None


def _table_telemetry(page: JsonRow) -> Iterator[Span | RefusedRow]:
    """Yields the spans in a row of a table, or of an API response with rows."""
    for row in listed_rows(page, "rows", "data"):
        columns = _columns_of(row.data)
        if columns is None:
            yield RefusedRow(row.location, "not a span")
        else:
            yield _span_of_table(row, columns)


def _span_of_table(table_row: JsonRow, columns: _Columns) -> Span:
    """Parses a span in a row of a table."""
    row = table_row.data
    begin = iso_seconds(row.get(columns.begin))
    end = None if columns.end is None else iso_seconds(row.get(columns.end))
    if columns.nanoseconds is not None and begin is not None:
        duration = as_number(row.get(columns.nanoseconds))
        end = None if duration is None else begin + duration / 1e9
    is_failed = str(row.get(columns.status)).upper().endswith("ERROR")
    return Span(
        location=table_row.location,
        trace_id=first_text(row, columns.trace_id) or "",
        id=first_text(row, columns.span_id) or "",
        name=first_text(row, columns.name) or "",
        attributes=flat_attributes(as_row(parse_if_json(row[columns.attributes]))),
        resource=as_row(parse_if_json(row.get(columns.resource))),
        events=tuple(_table_events(row)),
        begin=begin,
        end=end,
        error=(first_text(row, columns.message) or "unknown") if is_failed else None,
    )


def _table_events(row: Row) -> Iterator[SpanEvent]:
    """Yields the events of a span in Logfire's and in ClickHouse's columns."""
    for event in map(as_row, as_list(parse_if_json(row.get("otel_events")))):
        yield SpanEvent(name=first_text(event, "event_name", "name") or "", fields=event)
    names, fields = as_list(row.get("Events.Name")), as_list(row.get("Events.Attributes"))
    for name, attributes in zip(names, fields, strict=False):
        if isinstance(name, str):
            yield SpanEvent(name=name, fields=as_row(attributes))


PHOENIX = TraceFormat(
    name="phoenix",
    title="Phoenix: spans and annotations",
    is_recognised=detect_by_item(_is_phoenix, "data"),
    read=lambda paths: read_spans(paths, _phoenix_telemetry),
)
SPAN_TABLE = TraceFormat(
    name="span_table",
    title="Tables of spans: Logfire's records, ClickHouse's otel_traces",
    is_recognised=detect_by_item(lambda row: _columns_of(row) is not None, "rows", "data"),
    read=lambda paths: read_spans(paths, _table_telemetry),
)

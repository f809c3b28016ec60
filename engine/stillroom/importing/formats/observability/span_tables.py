"""Spans as rows of a table, as Logfire's queries and ClickHouse's `otel_traces` give them.

Source: the columns of Logfire's `records` and of the OpenTelemetry collector's ClickHouse exporter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillroom.data.checks import as_number
from stillroom.importing.bodies.facts import as_list, as_row, first_text, iso_seconds, parsed
from stillroom.importing.formats.observability.otlp import Span, SpanEvent, flat_attributes
from stillroom.importing.formats.observability.spans import read_spans
from stillroom.importing.json_rows import Row, head_rows
from stillroom.importing.records import Place, Refusal, TraceFormat
from stillroom.importing.table_rows import csv_head


@dataclass(frozen=True, slots=True)
class _Columns:
    """The names of a table's columns."""

    trace_id: str
    span_id: str
    attributes: str
    resource: str
    name: str
    begin: str
    end: str | None
    nanoseconds: str | None
    """The column of the duration, if there is none of the end."""
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


def _items(row: Row) -> list[Row]:
    """Returns the rows of a query's answer, or the row itself."""
    listed = as_list(row.get("rows")) or as_list(row.get("data"))
    return [as_row(item) for item in listed] or [row]


def _is_recognised(path: Path, head: bytes) -> bool:
    rows = (*head_rows(head), *csv_head(path, head))
    return any(_columns_of(item) is not None for row in rows for item in _items(row))


def _telemetry_of(row: Row, place: Place) -> Iterator[Span | Refusal]:
    for number, item in enumerate(_items(row), start=1):
        own = place if item is row else Place(place.path, place.line, f"row {number}")
        columns = _columns_of(item)
        if columns is None:
            yield Refusal(own, "no span")
        else:
            yield _span(item, columns, own)


def _span(row: Row, columns: _Columns, place: Place) -> Span:
    begin = iso_seconds(row.get(columns.begin))
    end = None if columns.end is None else iso_seconds(row.get(columns.end))
    if columns.nanoseconds is not None and begin is not None:
        duration = as_number(row.get(columns.nanoseconds))
        end = None if duration is None else begin + duration / 1e9
    is_failed = str(row.get(columns.status)).upper().endswith("ERROR")
    return Span(
        place=place,
        trace_id=first_text(row, columns.trace_id) or "",
        id=first_text(row, columns.span_id) or "",
        name=first_text(row, columns.name) or "",
        attributes=flat_attributes(as_row(parsed(row[columns.attributes]))),
        resource=as_row(parsed(row.get(columns.resource))),
        events=tuple(_events(row)),
        begin=begin,
        end=end,
        error=(first_text(row, columns.message) or "unknown") if is_failed else None,
    )


def _events(row: Row) -> Iterator[SpanEvent]:
    for event in map(as_row, as_list(parsed(row.get("otel_events")))):
        yield SpanEvent(name=first_text(event, "event_name", "name") or "", fields=event)
    names, fields = as_list(row.get("Events.Name")), as_list(row.get("Events.Attributes"))
    for name, attributes in zip(names, fields, strict=False):
        if isinstance(name, str):
            yield SpanEvent(name=name, fields=as_row(attributes))


SPAN_TABLE = TraceFormat(
    name="span_table",
    title="Tables of spans: Logfire's records, ClickHouse's otel_traces",
    is_recognised=_is_recognised,
    read=lambda paths: read_spans(paths, _telemetry_of),
)

"""Spans in other layouts than OTLP: Phoenix's exports, and rows of tables of spans.

Source: Phoenix's `GET /v1/projects/{project}/spans` and `/span_annotations`, and the columns of its
client's `get_spans_dataframe()`, which are called `context.span_id`,
`attributes.llm.input_messages` etc.; the columns of Logfire's `records` and of the OpenTelemetry
collector's ClickHouse exporter (`otel_traces`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillroom.data.checks import as_number
from stillroom.importing.formats.observability.openinference import KIND
from stillroom.importing.formats.observability.otlp import (
    Span,
    SpanEvent,
    flat_attributes,
    plain_span,
)
from stillroom.importing.formats.observability.spans import read_spans
from stillroom.importing.json_rows import JsonRow, Row, head_rows, listed_rows
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_seconds,
    parsed,
)
from stillroom.importing.records import Feedback, Place, Refusal, TraceFormat, feedback_row
from stillroom.importing.table_rows import csv_head

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


def _is_phoenix(_path: Path, head: bytes) -> bool:
    rows = (as_row(item) for row in head_rows(head) for item in as_list(row.get("data")) or [row])
    return any(_is_span(row) or _is_table_row(row) or _is_annotation(row) for row in rows)


def _phoenix_telemetry(whole: JsonRow) -> Iterator[Span | Feedback | Refusal]:
    """Yields the spans and the judgements that a row holds."""
    for row in listed_rows(whole, "data"):
        item, place = row.data, row.place
        if _is_annotation(item):
            yield _annotation(item, place)
            continue
        span = _from_columns(item) if _is_table_row(item) else item
        if not _is_span(span):
            yield Refusal(place, "neither a span nor an annotation")
            continue
        kind = {KIND: span["span_kind"]} if "span_kind" in span else {}
        yield plain_span(span | {"attributes": kind | as_row(span["attributes"])}, place)
        for judgement in as_list(span.get("annotations")):
            span_id = as_row(span["context"]).get("span_id")
            yield _annotation({"span_id": span_id} | as_row(judgement), place)


def _from_columns(row: Row) -> Row:
    """Returns a row of the client's table as the API lists spans."""
    attributes = {
        key.removeprefix(_ATTRIBUTE): value
        for key, value in row.items()
        if key.startswith(_ATTRIBUTE) and value is not None
    }
    context = {name: row.get(f"context.{name}") for name in ("span_id", "trace_id")}
    rest = {
        key: value for key, value in row.items() if not key.startswith((_ATTRIBUTE, "context."))
    }
    return rest | {"context": context, "attributes": attributes}


def _annotation(row: Row, place: Place) -> Feedback | Refusal:
    about = first_text(row, "span_id", "trace_id", "session_id")
    name = first_text(row, "name", "annotation_name")
    result = as_row(row.get("result"))
    score = decimal_number(result.get("score", row.get("result.score")))
    return feedback_row(place, about, name, score, result.get("label", row.get("result.label")))


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


def _is_span_table(path: Path, head: bytes) -> bool:
    rows = (*head_rows(head), *csv_head(path, head))
    listed = (as_list(row.get("rows")) or as_list(row.get("data")) or [row] for row in rows)
    return any(_columns_of(as_row(item)) is not None for items in listed for item in items)


def _table_telemetry(whole: JsonRow) -> Iterator[Span | Refusal]:
    for row in listed_rows(whole, "rows", "data"):
        columns = _columns_of(row.data)
        if columns is None:
            yield Refusal(row.place, "no span")
        else:
            yield _span_of_table(row, columns)


def _span_of_table(placed: JsonRow, columns: _Columns) -> Span:
    row = placed.data
    begin = iso_seconds(row.get(columns.begin))
    end = None if columns.end is None else iso_seconds(row.get(columns.end))
    if columns.nanoseconds is not None and begin is not None:
        duration = as_number(row.get(columns.nanoseconds))
        end = None if duration is None else begin + duration / 1e9
    is_failed = str(row.get(columns.status)).upper().endswith("ERROR")
    return Span(
        place=placed.place,
        trace_id=first_text(row, columns.trace_id) or "",
        id=first_text(row, columns.span_id) or "",
        name=first_text(row, columns.name) or "",
        attributes=flat_attributes(as_row(parsed(row[columns.attributes]))),
        resource=as_row(parsed(row.get(columns.resource))),
        events=tuple(_table_events(row)),
        begin=begin,
        end=end,
        error=(first_text(row, columns.message) or "unknown") if is_failed else None,
    )


def _table_events(row: Row) -> Iterator[SpanEvent]:
    for event in map(as_row, as_list(parsed(row.get("otel_events")))):
        yield SpanEvent(name=first_text(event, "event_name", "name") or "", fields=event)
    names, fields = as_list(row.get("Events.Name")), as_list(row.get("Events.Attributes"))
    for name, attributes in zip(names, fields, strict=False):
        if isinstance(name, str):
            yield SpanEvent(name=name, fields=as_row(attributes))


PHOENIX = TraceFormat(
    name="phoenix",
    title="Phoenix: spans and annotations",
    is_recognised=_is_phoenix,
    read=lambda paths: read_spans(paths, _phoenix_telemetry),
)
SPAN_TABLE = TraceFormat(
    name="span_table",
    title="Tables of spans: Logfire's records, ClickHouse's otel_traces",
    is_recognised=_is_span_table,
    read=lambda paths: read_spans(paths, _table_telemetry),
)

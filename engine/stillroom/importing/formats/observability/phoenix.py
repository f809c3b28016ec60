"""Exports of Phoenix: spans from its API, tables of its client as JSON rows, and annotations.

Source: `GET /v1/projects/{project}/spans` and `/span_annotations`, and the columns of
`get_spans_dataframe()`, which are called `context.span_id`, `attributes.llm.input_messages` etc.
"""

from collections.abc import Iterator
from pathlib import Path

from stillroom.importing.bodies.facts import as_list, as_row, decimal_number, first_text
from stillroom.importing.formats.observability.openinference import KIND
from stillroom.importing.formats.observability.otlp import Span, plain_span
from stillroom.importing.formats.observability.spans import read_spans
from stillroom.importing.json_rows import Row, head_rows
from stillroom.importing.records import Feedback, Place, Refusal, TraceFormat

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


def _is_recognised(_path: Path, head: bytes) -> bool:
    rows = (item for row in head_rows(head) for item in _items(row))
    return any(_is_span(row) or _is_table_row(row) or _is_annotation(row) for row in rows)


def _items(row: Row) -> list[Row]:
    """Returns the rows of an answer of the API, or the row itself."""
    return [as_row(item) for item in as_list(row.get("data"))] or [row]


def _telemetry_of(row: Row, place: Place) -> Iterator[Span | Feedback | Refusal]:
    """Yields the spans and the judgements that a row holds."""
    for number, item in enumerate(_items(row), start=1):
        own = place if item is row else Place(place.path, place.line, f"row {number}")
        if _is_annotation(item):
            yield _feedback(item, own)
            continue
        span = _from_columns(item) if _is_table_row(item) else item
        if not _is_span(span):
            yield Refusal(own, "neither a span nor an annotation")
            continue
        kind = {KIND: span["span_kind"]} if "span_kind" in span else {}
        yield plain_span(span | {"attributes": kind | as_row(span["attributes"])}, own)
        for judgement in as_list(span.get("annotations")):
            span_id = as_row(span["context"]).get("span_id")
            yield _feedback({"span_id": span_id} | as_row(judgement), own)


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


def _feedback(row: Row, place: Place) -> Feedback | Refusal:
    about = first_text(row, "span_id", "trace_id", "session_id")
    name = first_text(row, "name", "annotation_name")
    score = decimal_number(as_row(row.get("result")).get("score", row.get("result.score")))
    if about is None or name is None:
        return Refusal(place, "a judgement of nothing", "it names no span, or not what it judges")
    if score is None:
        label = as_row(row.get("result")).get("label", row.get("result.label"))
        return Refusal(place, "a judgement without a number", f"{name}: {label}")
    return Feedback(place, about, name, score)


PHOENIX = TraceFormat(
    name="phoenix",
    title="Phoenix: spans and annotations",
    is_recognised=_is_recognised,
    read=lambda paths: read_spans(paths, _telemetry_of),
)

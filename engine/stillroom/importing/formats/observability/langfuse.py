"""Reads Langfuse's observations, traces and scores, from its UI, API or blob storage export.

Source: the fields of the API (camelCase) and of the blob storage export (snake_case). CSV files
have JSON text in their columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    convert_rows,
    head_rows,
)
from stillroom.importing.payloads.calls import NO_CALL, logged_calls
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    iso_time,
    parse_if_json,
    seconds_between,
    text_of,
    usage_details,
    usage_of,
    without_empty,
)
from stillroom.importing.payloads.free_form import free_form_calls, free_form_tools, note_truncation
from stillroom.importing.payloads.messages import (
    IMAGES_DROPPED,
    MessageReader,
    tool_schemas,
)
from stillroom.importing.records import (
    Feedback,
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
    feedback_row,
)
from stillroom.importing.table_rows import csv_head, parquet_footer, read_any_rows
from stillroom.types import Usage

_MEDIA = "@@@langfuseMedia:type=image"
_TRACE_KEYS = frozenset({"sessionId", "session_id", "userId", "user_id", "bookmarked", "htmlPath"})
_OBSERVATION_TYPES = frozenset(
    {
        "AGENT",
        "CHAIN",
        "EMBEDDING",
        "EVALUATOR",
        "EVENT",
        "GENERATION",
        "GUARDRAIL",
        "RETRIEVER",
        "SPAN",
        "TOOL",
    }
)


_PARQUET_COLUMNS = (
    (b"trace_id", b"parent_observation_id"),
    (b"trace_id", b"observation_id", b"data_type"),
    (b"session_id", b"bookmarked", b"timestamp"),
)
"""Columns that identify a Parquet file of the blob storage export."""


@dataclass(frozen=True, slots=True)
class _Item:
    """One observation, trace or score."""

    location: Location
    data: Row
    kind: str
    """`observation`, `trace` or `score`; empty for any other row."""


@dataclass(slots=True)
class _Traces:
    """The session of each trace, and the traces that have generations."""

    sessions: dict[str, str] = field(default_factory=dict[str, str])
    with_generations: set[str] = field(default_factory=set[str])


def _value(row: Row, camel: str, *others: str) -> Any:
    """Returns a field by its camelCase name, its snake_case name or another name."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in camel)
    return next((row[name] for name in (camel, snake, *others) if row.get(name) is not None), None)


def _kind(row: Row) -> str:
    """Returns `_Item.kind` for a row."""
    has_trace = _value(row, "traceId") is not None
    has_target = has_trace or any(_value(row, f"{name}Id") for name in ("observation", "session"))
    if "name" in row and "value" in row and has_target:
        return "score"
    has_type = text_of(row.get("type")) in _OBSERVATION_TYPES
    if has_trace and (has_type or ("input" in row and _value(row, "startTime") is not None)):
        return "observation"
    is_trace = "timestamp" in row and "name" in row and not _TRACE_KEYS.isdisjoint(row)
    return (
        "trace" if "id" in row and (is_trace or isinstance(row.get("observations"), list)) else ""
    )


def _items(row: Row, location: Location) -> Iterator[_Item]:
    """Yields the items of a row: the row itself, and the items nested in a response or a trace."""
    listed = as_list(row.get("data")) if "id" not in row else []
    if not listed and isinstance(row.get("traces"), list) and "name" not in row:
        listed = as_list(row["traces"])
    if listed:
        for number, item in enumerate(listed, start=1):
            yield from _items(as_row(item), Location(location.path, location.line, f"row {number}"))
        return
    trace = as_row(row.get("trace"))
    main = trace | {name: row.get(name) for name in ("observations", "scores")} if trace else row
    yield _Item(location, main, _kind(main))
    if _kind(main) != "trace":
        return
    for name, kind in (("observations", "observation"), ("scores", "score")):
        for number, item in enumerate(as_list(main.get(name)), start=1):
            if not isinstance(item, dict):
                continue
            part = text_of(as_row(item).get("id")) or f"{name} {number}"
            data = {"traceId": main.get("id")} | as_row(item)
            yield _Item(Location(location.path, location.line, part), data, kind)


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the calls and feedback in Langfuse's files, which it reads twice."""
    traces = _Traces()
    for row in read_any_rows(*paths):
        for item in _items(row.data, row.location) if isinstance(row, JsonRow) else ():
            _store_trace(item, traces)
    for row in read_any_rows(*paths):
        if isinstance(row, RefusedRow):
            yield row
            continue
        for item in _items(row.data, row.location):
            rows = [JsonRow(item.location, item.data)]
            yield from convert_rows(rows, lambda _, item=item: _rows_of(item, traces))


def _store_trace(item: _Item, traces: _Traces) -> None:
    """Stores the session of an item's trace, and whether the trace has generations."""
    trace = item.data.get("id") if item.kind == "trace" else _value(item.data, "traceId")
    session = text_of(_value(item.data, "sessionId"))
    if not isinstance(trace, str):
        return
    if session is not None and item.kind != "score":
        traces.sessions[trace] = session
    if item.kind == "observation" and _is_generation(item.data):
        traces.with_generations.add(trace)


def _is_generation(row: Row) -> bool:
    kind = row.get("type")
    if isinstance(kind, str) and kind:
        return kind.upper() == "GENERATION"
    return text_of(_model(row)) is not None


def _model(row: Row) -> Any:
    return _value(row, "model", "providedModelName", "provided_model_name")


def _rows_of(item: _Item, traces: _Traces) -> Iterator[SourceRow]:
    """Yields the calls or the feedback of an item, or refuses it."""
    match item.kind:
        case "score":
            yield _feedback(item)
        case "observation" if _is_generation(item.data):
            trace = text_of(_value(item.data, "traceId")) or ""
            yield from _calls(item, trace, traces.sessions.get(trace))
        case "observation":
            yield RefusedRow(item.location, NO_CALL, str(item.data.get("type")))
        case "trace":
            trace = text_of(item.data.get("id")) or ""
            yield from _scores_of(item)
            if trace in traces.with_generations:
                yield RefusedRow(
                    item.location, NO_CALL, "it is a trace; its generations are imported"
                )
            else:
                yield from _calls(item, trace, traces.sessions.get(trace))
        case _:
            yield RefusedRow(item.location, "neither an observation, a trace nor a score")


def _feedback(item: _Item) -> Feedback | RefusedRow:
    """Returns the feedback in a score."""
    row = item.data
    name = text_of(row.get("name"))
    target_id = next(
        (text for key in ("observationId", "traceId", "sessionId")
         if (text := text_of(_value(row, key)))), None
    )  # fmt: skip
    is_number = str(_value(row, "dataType") or "NUMERIC").upper() in ("NUMERIC", "BOOLEAN")
    value = row.get("value")
    score = float(value) if isinstance(value, bool) else decimal_number(value)
    label = _value(row, "stringValue")
    return feedback_row(item.location, target_id, name, score if is_number else None, label)


def _scores_of(item: _Item) -> Iterator[Feedback]:
    """Yields the feedback in a trace's `scores`, if they are values by name, as in a table."""
    for name, values in as_row(parse_if_json(item.data.get("scores"))).items():
        for number, value in enumerate(as_list(values) or [values]):
            score = decimal_number(value)
            target_id = text_of(item.data.get("id"))
            if score is not None and target_id is not None:
                location = Location(item.location.path, item.location.line, f"{name} {number}")
                yield Feedback(location, target_id, name, score)


def _calls(item: _Item, trace: str, session: str | None) -> Iterator[LoggedConversation]:
    """Yields the calls of a generation, or of a trace without generations."""
    row, reader = item.data, MessageReader()
    input_value = row.get("input")
    _note_dropped(row, reader)
    failed = str(row.get("level")).upper() == "ERROR"
    error = (text_of(_value(row, "statusMessage")) or "unknown") if failed else None
    calls = free_form_calls(input_value, row.get("output"), reader, error=error)
    begin, end = _value(row, "startTime", "timestamp"), _value(row, "endTime")
    row_id = text_of(row.get("id"))
    log_fields = {
        "tools": _tools(row, input_value),
        "group": text_of(_value(row, "sessionId")) or session,
        "id": row_id,
        "feedback_ids": (trace,) if trace and trace != row_id else (),
        "model": text_of(_model(row)),
        "usage": _usage(row),
        "cost_usd": _cost(row),
        "started_at": iso_time(begin),
        "duration_s": seconds_between(begin, end),
    }
    metadata = without_empty(
        trace_id=trace,
        tags=parse_if_json(row.get("tags")),
        metadata=parse_if_json(row.get("metadata")),
        **usage_details(as_row(parse_if_json(row.get("usage")))),
    )
    yield from logged_calls(
        item.location, calls, log_fields, metadata=metadata, part=item.location.part or row_id
    )


def _note_dropped(row: Row, reader: MessageReader) -> None:
    """Records images and truncated contents of a row as dropped."""
    texts = [str(row.get(name)) for name in ("input", "output")]
    if any(_MEDIA in text for text in texts):
        reader.drop(IMAGES_DROPPED)
    for text in texts:
        note_truncation(text, reader)


def _tools(row: Row, input_value: Any) -> list[Row] | None:
    """Returns the schemas of the offered tools; None if the row does not have them."""
    tools = free_form_tools(input_value)
    if tools is not None:
        return tools
    definitions = parse_if_json(_value(row, "toolDefinitions"))
    by_name = as_row(definitions)
    listed = [as_row(parse_if_json(tool)) | {"name": name} for name, tool in by_name.items()]
    return tool_schemas(listed or as_list(definitions))


def _usage(row: Row) -> Usage | None:
    """Returns the usage; details with `input` or `output` in their names are summed."""
    details = as_row(parse_if_json(_value(row, "usageDetails")))
    prompt = [v for name, v in details.items() if "input" in name or name == "prompt"]
    completion = [v for name, v in details.items() if "output" in name or name == "completion"]
    numbers = [[decimal_number(value) or 0 for value in counts] for counts in (prompt, completion)]
    if any(numbers):
        return Usage(prompt_tokens=int(sum(numbers[0])), completion_tokens=int(sum(numbers[1])))
    usage = as_row(parse_if_json(row.get("usage"))) | details
    renamed = {"prompt_tokens": usage.get("input"), "completion_tokens": usage.get("output")}
    return usage_of(usage) or usage_of(renamed) or usage_of(row)


def _cost(row: Row) -> float | None:
    details = as_row(parse_if_json(_value(row, "costDetails")))
    cost = _value(row, "calculatedTotalCost", "totalCost", "total_cost")
    return decimal_number(details.get("total", cost) if cost is None else cost)


def _is_recognised(path: Path, head: bytes) -> bool:
    columns = parquet_footer(path, head)
    if any(all(name in columns for name in names) for names in _PARQUET_COLUMNS):
        return True
    for row in (*head_rows(head), *csv_head(path, head)):
        for item in _items(row, Location(path, 1)):
            if item.kind in ("observation", "score") or (
                item.kind == "trace" and _has_known_fields(row)
            ):
                return True
    return False


def _has_known_fields(row: Row) -> bool:
    return any(name in row for name in ("input", "output", "observations", "trace", "data", "tags"))


LANGFUSE = TraceFormat(
    name="langfuse",
    title="Langfuse: observations, traces and scores",
    is_recognised=_is_recognised,
    read=_read,
)

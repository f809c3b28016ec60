"""Reads LangSmith's runs, from its SDK or its bulk export, and feedback.

Source: the SDK's `Run`, as returned by `Client.list_runs()`, or by `read_run()` with its child runs
nested in it; the bulk export writes the same fields to Parquet, with objects as JSON text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    convert_rows,
    listed_rows,
)
from stillroom.importing.payloads.calls import NO_CALL, logged_calls
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_time,
    parse_if_json,
    seconds_between,
    text_of,
    usage_details,
    usage_of,
    without_empty,
)
from stillroom.importing.payloads.free_form import free_form_calls, free_form_tools
from stillroom.importing.payloads.messages import MessageReader
from stillroom.importing.records import (
    Feedback,
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
    feedback_row,
)
from stillroom.importing.table_rows import detect_by_item, parquet_footer, read_any_rows

_THREADS = ("session_id", "thread_id", "conversation_id")
"""The metadata keys that LangSmith uses for threads."""
_PARQUET_COLUMNS = (b"run_type", b"dotted_order")


def _runs(paths: Sequence[Path]) -> Iterator[JsonRow | RefusedRow]:
    """Yields the runs and feedback: each row, or the rows of an API response, with child runs."""
    for row in read_any_rows(*paths):
        if isinstance(row, RefusedRow):
            yield row
        elif "run_type" in row.data:
            yield from _with_child_runs(row)
        else:
            for listed in listed_rows(row, "runs", part="run"):
                yield from _with_child_runs(listed)


def _with_child_runs(row: JsonRow) -> Iterator[JsonRow]:
    """Yields a run, and the runs that are nested in its `child_runs`, at any depth."""
    waiting = [row]
    while waiting:
        run = waiting.pop()
        yield run
        if as_list(run.data.get("child_runs")):
            part = f"{run.location.part} child".lstrip()
            waiting += reversed([*listed_rows(run, "child_runs", part=part)])


def _is_feedback(row: Row) -> bool:
    return "run_type" not in row and "run_id" in row and "key" in row


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the calls and feedback in LangSmith's files, which it reads twice."""
    threads: dict[str, str] = {}
    for row in _runs(paths):
        if isinstance(row, JsonRow) and (thread := _thread(row.data)) is not None:
            threads.setdefault(text_of(row.data.get("trace_id")) or "", thread)
    yield from convert_rows(_runs(paths), lambda row: _rows_of(row, threads))


def _rows_of(item: JsonRow, threads: dict[str, str]) -> Iterator[SourceRow]:
    """Yields the calls or the feedback of a row, or refuses it."""
    row = item.data
    kind = row.get("run_type")
    if _is_feedback(row):
        yield _feedback(item)
    elif not isinstance(kind, str):
        yield RefusedRow(item.location, "neither a run nor feedback")
    elif kind != "llm":
        yield RefusedRow(item.location, NO_CALL, kind)
        for name, score in _scores(row).items():
            location = Location(item.location.path, item.location.line, f"feedback {name}")
            yield Feedback(location, text_of(row.get("id")) or "", name, score)
    else:
        yield from _calls(item, threads)


def _feedback(item: JsonRow) -> Feedback | RefusedRow:
    """Returns the feedback in a row."""
    row = item.data
    score = row.get("score")
    number = float(score) if isinstance(score, bool) else decimal_number(score)
    target_id = first_text(row, "run_id", "trace_id")
    return feedback_row(item.location, target_id, text_of(row.get("key")), number, row.get("value"))


def _scores(row: Row) -> dict[str, float]:
    """Returns the average of each of a run's feedback scores."""
    stats = as_row(parse_if_json(row.get("feedback_stats")))
    numbers = {name: decimal_number(as_row(value).get("avg")) for name, value in stats.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _metadata(row: Row) -> Row:
    extra = as_row(parse_if_json(row.get("extra")))
    return as_row(parse_if_json(row.get("metadata"))) or as_row(extra.get("metadata"))


def _thread(row: Row) -> str | None:
    return first_text(_metadata(row), *_THREADS)


def _ancestors(row: Row) -> tuple[str, ...]:
    """Returns the ids of a run's trace and of all its ancestor runs."""
    order = text_of(row.get("dotted_order")) or ""
    ids = (step.partition("Z")[2] for step in order.split(".")[:-1])
    candidates = (row.get("trace_id"), *ids, row.get("parent_run_id"))
    row_id = row.get("id")
    return tuple(dict.fromkeys(i for i in candidates if isinstance(i, str) and i and i != row_id))


def _calls(item: JsonRow, threads: dict[str, str]) -> Iterator[LoggedConversation]:
    """Yields the calls of a run; `threads` has the thread of each trace."""
    row = item.data
    input_value, output = parse_if_json(row.get("inputs")), parse_if_json(row.get("outputs"))
    calls = free_form_calls(input_value, output, MessageReader(), error=text_of(row.get("error")))
    metadata, trace = _metadata(row), text_of(row.get("trace_id")) or ""
    usage = _usage(metadata, as_row(output))
    row_id = text_of(row.get("id"))
    log_fields = {
        "tools": _tools(row, input_value),
        "group": _thread(row) or threads.get(trace),
        "id": row_id,
        "feedback_ids": _ancestors(row),
        "model": _model(row, metadata, as_row(output)),
        # LangSmith counts tokens itself if the SDK sent no usage.
        "usage": usage_of(usage) or usage_of(row),
        "cost_usd": decimal_number(row.get("total_cost")),
        "started_at": iso_time(row.get("start_time")),
        "duration_s": seconds_between(row.get("start_time"), row.get("end_time")),
    }
    details = without_empty(trace_id=trace, tags=parse_if_json(row.get("tags"))) | usage_details(
        usage
    )
    provider, part = text_of(metadata.get("ls_provider")), item.location.part or row_id
    logged = logged_calls(
        item.location, calls, log_fields, metadata=details, provider=provider, part=part
    )
    for number, call in enumerate(logged):
        yield call if number else replace(call, scores=_scores(row))


def _invocation(row: Row) -> Row:
    return as_row(as_row(parse_if_json(row.get("extra"))).get("invocation_params"))


def _tools(row: Row, input_value: Any) -> list[Row] | None:
    tools = free_form_tools(input_value)
    return tools if tools is not None else free_form_tools(_invocation(row))


def _model(row: Row, metadata: Row, output: Row) -> str | None:
    """Returns the model that answered, or else the model that was requested."""
    replied = first_text(output, "model") or first_text(
        as_row(output.get("llm_output")), "model_name", "model"
    )
    called = first_text(metadata, "ls_model_name") or first_text(
        _invocation(row), "model", "model_name"
    )
    return replied or called


def _usage(metadata: Row, output: Row) -> Row:
    """Returns the usage as an API's usage object."""
    llm_output = as_row(output.get("llm_output"))
    for usage in (
        as_row(metadata.get("usage_metadata")),
        as_row(output.get("usage_metadata")),
        as_row(llm_output.get("token_usage")),
        as_row(llm_output.get("usage")),
        as_row(output.get("usage")),
    ):
        if usage_of(usage) is not None:
            return usage
    return {}


def _is_recognised(path: Path, head: bytes) -> bool:
    columns = parquet_footer(path, head)
    if all(name in columns for name in _PARQUET_COLUMNS):
        return True
    return detect_by_item(_is_run_or_feedback, "runs")(path, head)


def _is_run_or_feedback(row: Row) -> bool:
    return _is_feedback(row) or ("run_type" in row and "inputs" in row)


LANGSMITH = TraceFormat(
    name="langsmith",
    title="LangSmith: runs and feedback",
    is_recognised=_is_recognised,
    read=_read,
)

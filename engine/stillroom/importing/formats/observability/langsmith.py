"""Exports of LangSmith: runs of its SDK and of its bulk export, and feedback.

Source: the SDK's `Run`, as `Client.list_runs()` returns it; the bulk export writes the same fields
to parquet, with JSON texts in those that hold objects.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.importing.bodies.blocks import BlockReader
from stillroom.importing.bodies.exchanges import NO_CALL, NO_REPLY
from stillroom.importing.bodies.facts import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_time,
    parsed,
    seconds_between,
    text_of,
    usage_details,
    usage_of,
    without_nothing,
)
from stillroom.importing.bodies.free_form import FreeReply, free_prompt, free_replies, free_tools
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_row,
    head_rows,
)
from stillroom.importing.records import (
    Feedback,
    LoggedConversation,
    Place,
    Refusal,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.table_rows import csv_head, parquet_columns, read_any_rows

_THREADS = ("session_id", "thread_id", "conversation_id")
"""The names under which LangSmith looks for a thread in a run's metadata."""
_PARQUET_COLUMNS = (b"run_type", b"dotted_order")


@dataclass(frozen=True, slots=True)
class _Item:
    """One run or one judgement."""

    place: Place
    data: Row


def _items(row: Row, place: Place) -> Iterator[_Item]:
    """Yields the runs that a row holds: itself, or those of an answer of the API."""
    listed = as_list(row.get("runs")) if "run_type" not in row else []
    if not listed:
        yield _Item(place, row)
    for number, item in enumerate(listed, start=1):
        yield _Item(Place(place.path, place.line, f"run {number}"), as_row(item))


def _all_items(paths: Sequence[Path]) -> Iterator[_Item | Refusal]:
    for path in paths:
        for row in read_any_rows(path):
            if isinstance(row, JsonRow):
                yield from _items(row.data, row.place)
            else:
                yield row


def _is_judgement(row: Row) -> bool:
    return "run_type" not in row and "run_id" in row and "key" in row


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    threads: dict[str, str] = {}
    for item in _all_items(paths):
        if isinstance(item, _Item) and (thread := _thread(item.data)) is not None:
            threads.setdefault(text_of(item.data.get("trace_id")) or "", thread)
    for item in _all_items(paths):
        if isinstance(item, Refusal):
            yield item
        else:
            row = JsonRow(item.place, item.data)
            yield from convert_row(row, lambda _, item=item: _rows_of(item, threads))


def _rows_of(item: _Item, threads: dict[str, str]) -> Iterator[SourceRow]:
    row = item.data
    kind = row.get("run_type")
    if _is_judgement(row):
        yield _feedback(item)
    elif not isinstance(kind, str):
        yield Refusal(item.place, "neither a run nor feedback")
    elif kind != "llm":
        yield Refusal(item.place, NO_CALL, kind)
        for name, score in _scores(row).items():
            place = Place(item.place.path, item.place.line, f"feedback {name}")
            yield Feedback(place, text_of(row.get("id")) or "", name, score)
    else:
        yield from _calls(item, threads)


def _feedback(item: _Item) -> Feedback | Refusal:
    row = item.data
    about, name = first_text(row, "run_id", "trace_id"), text_of(row.get("key"))
    if about is None or name is None:
        return Refusal(
            item.place, "a judgement of nothing", "it names no run, or not what it judges"
        )
    score = row.get("score")
    number = float(score) if isinstance(score, bool) else decimal_number(score)
    if number is None:
        return Refusal(item.place, "a judgement without a number", f"{name}: {row.get('value')}")
    return Feedback(item.place, about, name, number)


def _scores(row: Row) -> dict[str, float]:
    """Returns the averages of a run's feedback by its name."""
    stats = as_row(parsed(row.get("feedback_stats")))
    numbers = {name: decimal_number(as_row(value).get("avg")) for name, value in stats.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _metadata(row: Row) -> Row:
    extra = as_row(parsed(row.get("extra")))
    return as_row(parsed(row.get("metadata"))) or as_row(extra.get("metadata"))


def _thread(row: Row) -> str | None:
    return first_text(_metadata(row), *_THREADS)


def _ancestors(row: Row) -> tuple[str, ...]:
    """Returns the ids of the trace and of all runs within which a run was made."""
    order = text_of(row.get("dotted_order")) or ""
    ids = (step.partition("Z")[2] for step in order.split(".")[:-1])
    known = (row.get("trace_id"), *ids, row.get("parent_run_id"))
    own = row.get("id")
    return tuple(dict.fromkeys(i for i in known if isinstance(i, str) and i and i != own))


def _calls(item: _Item, threads: dict[str, str]) -> Iterator[LoggedConversation]:
    row, reader = item.data, BlockReader()
    given, said = parsed(row.get("inputs")), parsed(row.get("outputs"))
    prompt = free_prompt(given, reader)
    error = text_of(row.get("error"))
    if said in (None, "", {}, []):
        if error is None:
            raise UnreadableRowError(NO_REPLY, "the run has no outputs")
        found = [FreeReply([])]
    else:
        found = free_replies(said, reader)
    metadata, trace = _metadata(row), text_of(row.get("trace_id")) or ""
    usage = _usage(metadata, as_row(said))
    own = text_of(row.get("id"))
    for number, reply in enumerate(found):
        place = item.place
        if number:
            place = Place(place.path, place.line, f"{place.part or own} choice {number}")
        yield LoggedConversation(
            place=place,
            messages=[*prompt, *reply.messages],
            is_call=True,
            tools=_tools(row, given),
            group=_thread(row) or threads.get(trace),
            id=f"{own}#{number}" if number else own,
            judged_as=_ancestors(row),
            provider=text_of(metadata.get("ls_provider")),
            model=_model(row, metadata, as_row(said)),
            # If the SDK sent no counts, those of the service.
            usage=usage_of(usage) or usage_of(row),
            cost_usd=decimal_number(row.get("total_cost")),
            started_at=iso_time(row.get("start_time")),
            duration_s=seconds_between(row.get("start_time"), row.get("end_time")),
            finish_reason=reply.ending,
            error=None if reply.messages else error,
            scores={} if number else _scores(row),
            losses=tuple(reader.losses),
            metadata=without_nothing(trace_id=trace, tags=parsed(row.get("tags")))
            | usage_details(usage),
        )


def _invocation(row: Row) -> Row:
    return as_row(as_row(parsed(row.get("extra"))).get("invocation_params"))


def _tools(row: Row, given: Any) -> list[Row] | None:
    tools = free_tools(given)
    return tools if tools is not None else free_tools(_invocation(row))


def _model(row: Row, metadata: Row, said: Row) -> str | None:
    """Returns the model that answered, else the one that was called."""
    replied = first_text(said, "model") or first_text(
        as_row(said.get("llm_output")), "model_name", "model"
    )
    called = first_text(metadata, "ls_model_name") or first_text(
        _invocation(row), "model", "model_name"
    )
    return replied or called


def _usage(metadata: Row, said: Row) -> Row:
    """Returns the usage in the fields of an API's usage object."""
    output = as_row(said.get("llm_output"))
    for usage in (
        as_row(metadata.get("usage_metadata")),
        as_row(said.get("usage_metadata")),
        as_row(output.get("token_usage")),
        as_row(output.get("usage")),
        as_row(said.get("usage")),
    ):
        if usage_of(usage) is not None:
            return usage
    return {}


def _is_recognised(path: Path, head: bytes) -> bool:
    columns = parquet_columns(path, head)
    if all(name in columns for name in _PARQUET_COLUMNS):
        return True
    rows = (*head_rows(head), *csv_head(path, head))
    return any(
        _is_judgement(item.data) or ("run_type" in item.data and "inputs" in item.data)
        for row in rows
        for item in _items(row, Place(path, 1))
    )


LANGSMITH = TraceFormat(
    name="langsmith",
    title="LangSmith: runs and feedback",
    is_recognised=_is_recognised,
    read=_read,
)

"""Exports of Helicone: the requests that its export tool or its API returns.

Source: the rows of `npx @helicone/export --include-body` and of `POST /v1/request/query`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stillroom.data.layouts.foreign import numbers_by_name
from stillroom.importing.bodies.envelopes import logged_calls
from stillroom.importing.bodies.exchanges import NO_CONTENTS, read_exchanges
from stillroom.importing.bodies.facts import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_time,
    parsed,
    positive_number,
    seconds_between,
    usage_of,
    without_nothing,
)
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_row,
    head_rows,
)
from stillroom.importing.records import (
    LoggedConversation,
    Place,
    Refusal,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.table_rows import csv_head, read_any_rows

_SESSIONS = ("Helicone-Session-Id", "helicone-session-id", "session_id")


def _is_row(row: Row) -> bool:
    has_request = "request_created_at" in row and "request_id" in row
    # An export begins with the response, which may be longer than what is looked at.
    has_response = "response_created_at" in row and "response_id" in row
    return has_request or has_response


def _items(row: Row) -> list[Row]:
    """Returns the rows of an answer of the API, or the row itself."""
    return [as_row(item) for item in as_list(row.get("data"))] or [row]


def _is_recognised(path: Path, head: bytes) -> bool:
    rows = (*head_rows(head), *csv_head(path, head))
    return any(_is_row(item) for row in rows for item in _items(row))


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    for path in paths:
        for row in read_any_rows(path):
            if isinstance(row, Refusal):
                yield row
                continue
            for number, item in enumerate(_items(row.data), start=1):
                place = row.place
                if item is not row.data:
                    place = Place(path, place.line, f"request {number}")
                yield from convert_row(JsonRow(place, item), _calls)


def _calls(row: JsonRow) -> Iterator[LoggedConversation]:
    data = row.data
    if not _is_row(data):
        raise UnreadableRowError("no request of Helicone's")
    request, response = parsed(data.get("request_body")), parsed(data.get("response_body"))
    if not as_row(request) or not any(name in request for name in ("messages", "input")):
        detail = "export the requests again with --include-body; others than chats cannot be read"
        raise UnreadableRowError(NO_CONTENTS, detail)
    status = decimal_number(data.get("response_status"))
    if status is not None and status >= 400 and not as_row(response).get("error"):
        response = {"error": f"status {status:.0f}"}
    calls = [call.facts() for call in read_exchanges(request, response)]
    provider = first_text(data, "provider")
    metadata = without_nothing(properties=as_row(parsed(data.get("request_properties"))))
    yield from logged_calls(
        row.place, calls, _facts(data), metadata, provider.lower() if provider else None
    )


def _facts(row: Row) -> Row:
    begin, end = row.get("request_created_at"), row.get("response_created_at")
    delay = positive_number(decimal_number(row.get("delay_ms")))
    known: dict[str, Any] = without_nothing(
        id=first_text(row, "request_id"),
        group=first_text(as_row(parsed(row.get("request_properties"))), *_SESSIONS),
        model=first_text(row, "response_model", "model", "request_model"),
        usage=usage_of(row),
        started_at=iso_time(begin),
        scores=_scores(row),
    )
    cost = decimal_number(row.get("costUSD", row.get("cost")))
    seconds = seconds_between(begin, end) if delay is None else delay / 1000
    return known | {"cost_usd": cost, "duration_s": seconds}


def _scores(row: Row) -> dict[str, float]:
    scores = numbers_by_name(parsed(row.get("scores")))
    rating = row.get("feedback_rating")
    if rating in (True, False, "true", "false"):
        scores["feedback"] = float(rating in (True, "true"))
    return scores


HELICONE = TraceFormat(
    name="helicone",
    title="Helicone: exported requests",
    is_recognised=_is_recognised,
    read=_read,
)

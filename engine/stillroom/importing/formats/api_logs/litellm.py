"""Logs of LiteLLM: the payload that it hands its loggers, and its table of spend.

Source: LiteLLM's StandardLoggingPayload, which its loggers write to buckets and files, and the rows
of LiteLLM_SpendLogs, which hold messages if `store_prompts_in_spend_logs` is on.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_row,
    head_rows,
)
from stillroom.importing.payloads.calls import (
    NO_CALL,
    NO_CONTENTS,
    NO_REPLY,
    ApiCall,
    read_exchanges,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_time,
    parsed,
    seconds_between,
    text_of,
    usage_of,
    without_nothing,
)
from stillroom.importing.payloads.messages import TRUNCATED
from stillroom.importing.payloads.pairs import logged_calls
from stillroom.importing.records import (
    LoggedConversation,
    Place,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.table_rows import csv_head, read_any_rows

_CHAT_CALLS = frozenset(
    {
        "completion",
        "acompletion",
        "anthropic_messages",
        "responses",
        "aresponses",
        "pass_through_endpoint",
    }
)
_REDACTED = b"redacted-by-litellm"
_CUT = b"litellm_truncated"
_ENCODER = msgspec.json.Encoder(enc_hook=str)


def _is_row(row: Row) -> bool:
    is_logged = "custom_llm_provider" in row or "response_cost" in row
    return "call_type" in row and (is_logged or ("spend" in row and "request_id" in row))


def _is_recognised(path: Path, head: bytes) -> bool:
    return any(_is_row(row) for row in (*head_rows(head), *csv_head(path, head)))


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    for path in paths:
        for row in read_any_rows(path):
            yield from convert_row(row, _calls)


def _calls(row: JsonRow) -> Iterator[LoggedConversation]:
    data = row.data
    if not _is_row(data):
        raise UnreadableRowError("neither a payload nor a row of spend")
    if text_of(data["call_type"]) not in _CHAT_CALLS:
        raise UnreadableRowError(NO_CALL, str(data["call_type"]))
    request = _request(data)
    error = _error(data)
    response: Any = {"error": error} if error is not None else parsed(data.get("response"))
    if response in (None, "", {}, []):
        raise UnreadableRowError(NO_REPLY, "the row has no response")
    calls = read_exchanges(request, response)
    yield from _logged(row.place, data, request, calls)


def _request(row: Row) -> Row:
    """Returns the body of the request, as far as the row holds it.

    Raises UnreadableRowError if the messages were not recorded, or redacted.
    """
    given = parsed(row.get("messages"))
    body = as_row(parsed(row.get("proxy_server_request")))
    body = as_row(body.get("body")) or body
    settings = as_row(parsed(row.get("model_parameters")))
    if given in (None, "", {}, []):
        given = body.get("messages", body.get("input"))
    if given in (None, "", {}, []):
        detail = "turn on store_prompts_in_spend_logs, or log the payloads"
        raise UnreadableRowError(NO_CONTENTS, detail)
    if _REDACTED in _ENCODER.encode(given):
        detail = "turn off turn_off_message_logging and redact_user_messages"
        raise UnreadableRowError("contents were redacted", detail)
    is_input = isinstance(given, str) or "responses" in str(row["call_type"])
    name = "input" if is_input else "messages"
    held = as_row(given)
    return body | settings | (held if name in held else {name: given})


def _error(row: Row) -> str | None:
    if row.get("status") != "failure":
        return None
    facts = as_row(parsed(row.get("metadata")))
    for place in (row, facts):
        information = as_row(parsed(place.get("error_information")))
        if text := first_text(place, "error_str") or first_text(information, "error_message"):
            return text
    return "unknown"


def _logged(
    place: Place, row: Row, request: Row, calls: Sequence[ApiCall]
) -> Iterator[LoggedConversation]:
    metadata = as_row(parsed(row.get("metadata")))
    tags = as_list(parsed(row.get("request_tags")))
    begin, end = row.get("startTime"), row.get("endTime")
    cost = decimal_number(row.get("response_cost", row.get("spend")))
    if row.get("response_cost_failure_debug_info"):
        cost = None  # LiteLLM writes 0 for a model whose price it does not know
    known = without_nothing(
        id=first_text(row, "id", "request_id"),
        group=first_text(row, "session_id") or first_text(metadata, "session_id"),
        model=first_text(row, "model"),
        usage=usage_of(row),
        started_at=iso_time(begin),
    )
    facts = known | {"duration_s": seconds_between(begin, end), "cost_usd": cost}
    facts["judged_as"] = (trace,) if (trace := text_of(row.get("trace_id"))) else ()
    exchanges = [call.facts() for call in calls]
    if _CUT in _ENCODER.encode(request):
        exchanges = [fields | {"losses": (*fields["losses"], TRUNCATED)} for fields in exchanges]
    provider = first_text(row, "custom_llm_provider")
    yield from logged_calls(place, exchanges, facts, without_nothing(tags=tags), provider)


LITELLM = TraceFormat(
    name="litellm",
    title="LiteLLM: logged payloads and spend logs",
    is_recognised=_is_recognised,
    read=_read,
)

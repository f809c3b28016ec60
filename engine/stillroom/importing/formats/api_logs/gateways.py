"""Reads logs of gateways: LiteLLM's payloads and spend logs, and Helicone's exported requests.

Source: LiteLLM's StandardLoggingPayload, which its loggers write to buckets and files, and the rows
of LiteLLM_SpendLogs, which have messages if `store_prompts_in_spend_logs` is on; the rows of
`npx @helicone/export --include-body` and of Helicone's `POST /v1/request/query`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.layouts.foreign import numbers_by_name
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    listed_rows,
)
from stillroom.importing.payloads.calls import (
    NO_CALL,
    NO_CONTENTS,
    NO_REPLY,
    logged_calls,
    read_calls,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    iso_time,
    non_negative_number,
    parse_if_json,
    seconds_between,
    text_of,
    usage_of,
    without_empty,
)
from stillroom.importing.payloads.messages import TRUNCATED
from stillroom.importing.records import LoggedConversation, RefusedRow, SourceRow, TraceFormat
from stillroom.importing.table_rows import detect_by_item, read_any_rows
from stillroom.teachers.providers import provider_serving

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
_REDACTION_MARK = b"redacted-by-litellm"
_TRUNCATION_MARK = b"litellm_truncated"
_ENCODER = msgspec.json.Encoder(enc_hook=str)


def _is_litellm_row(row: Row) -> bool:
    is_logged = "custom_llm_provider" in row or "response_cost" in row
    return "call_type" in row and (is_logged or ("spend" in row and "request_id" in row))


def _litellm_calls(row: JsonRow) -> Iterator[LoggedConversation]:
    """Yields the calls in a row of LiteLLM. Raises UnreadableRowError if there is none."""
    data = row.data
    if not _is_litellm_row(data):
        raise UnreadableRowError("neither a payload nor a spend log row of LiteLLM")
    if text_of(data["call_type"]) not in _CHAT_CALLS:
        raise UnreadableRowError(NO_CALL, str(data["call_type"]))
    request = _request(data)
    error = _error(data)
    response: Any = {"error": error} if error is not None else parse_if_json(data.get("response"))
    if response in (None, "", {}, []):
        raise UnreadableRowError(NO_REPLY, "the row has no response")
    calls = read_calls(request, response)
    if _TRUNCATION_MARK in _ENCODER.encode(request):
        calls = [replace(call, dropped=(*call.dropped, TRUNCATED)) for call in calls]
    yield from logged_calls(
        row.location,
        calls,
        _litellm_fields(data),
        metadata=without_empty(tags=as_list(parse_if_json(data.get("request_tags")))),
        provider=provider_serving(
            first_text(data, "custom_llm_provider"), first_text(data, "api_base")
        ),
    )


def _request(row: Row) -> Row:
    """Returns the body of the request, put together from the fields of the row.

    Raises UnreadableRowError if the messages were not recorded, or were redacted.
    """
    messages = parse_if_json(row.get("messages"))
    body = as_row(parse_if_json(row.get("proxy_server_request")))
    body = as_row(body.get("body")) or body
    settings = as_row(parse_if_json(row.get("model_parameters")))
    if messages in (None, "", {}, []):
        messages = body.get("messages", body.get("input"))
    if messages in (None, "", {}, []):
        detail = "enable store_prompts_in_spend_logs in LiteLLM, or log the payloads"
        raise UnreadableRowError(NO_CONTENTS, detail)
    if _REDACTION_MARK in _ENCODER.encode(messages):
        detail = "disable turn_off_message_logging and redact_user_messages in LiteLLM"
        raise UnreadableRowError("contents were redacted", detail)
    is_input = isinstance(messages, str) or "responses" in str(row["call_type"])
    name = "input" if is_input else "messages"
    wrapper = as_row(messages)
    return body | settings | (wrapper if name in wrapper else {name: messages})


def _error(row: Row) -> str | None:
    """Returns the error of a failed request; None if it succeeded."""
    if row.get("status") != "failure":
        return None
    for fields in (row, as_row(parse_if_json(row.get("metadata")))):
        information = as_row(parse_if_json(fields.get("error_information")))
        if text := first_text(fields, "error_str") or first_text(information, "error_message"):
            return text
    return "unknown"


def _litellm_fields(row: Row) -> Row:
    """Returns the fields of LoggedConversation that LiteLLM's row gives."""
    metadata = as_row(parse_if_json(row.get("metadata")))
    begin, end = row.get("startTime"), row.get("endTime")
    cost = decimal_number(row.get("response_cost", row.get("spend")))
    if row.get("response_cost_failure_debug_info"):
        cost = None  # LiteLLM writes 0 for models without a known price
    fields = without_empty(
        id=first_text(row, "id", "request_id"),
        group=first_text(row, "session_id") or first_text(metadata, "session_id"),
        model=first_text(row, "model"),
        usage=usage_of(row),
        started_at=iso_time(begin),
        feedback_ids=(trace,) if (trace := text_of(row.get("trace_id"))) else (),
    )
    return fields | {"duration_s": seconds_between(begin, end), "cost_usd": cost}


_HELICONE_SESSIONS = ("Helicone-Session-Id", "helicone-session-id", "session_id")


def _is_helicone_row(row: Row) -> bool:
    has_request = "request_created_at" in row and "request_id" in row
    # An export begins with the response, which may be longer than the head of the file.
    has_response = "response_created_at" in row and "response_id" in row
    return has_request or has_response


def _read_helicone(paths: Sequence[Path]) -> Iterator[SourceRow]:
    for row in read_any_rows(*paths):
        items = [row] if isinstance(row, RefusedRow) else listed_rows(row, "data", part="request")
        yield from convert_rows(items, _helicone_calls)


def _helicone_calls(row: JsonRow) -> Iterator[LoggedConversation]:
    """Yields the calls in a row of Helicone. Raises UnreadableRowError if there is none."""
    data = row.data
    if not _is_helicone_row(data):
        raise UnreadableRowError("not a request logged by Helicone")
    request, response = (
        parse_if_json(data.get("request_body")),
        parse_if_json(data.get("response_body")),
    )
    if not as_row(request) or not any(name in request for name in ("messages", "input")):
        detail = "export again with --include-body; only chat requests are supported"
        raise UnreadableRowError(NO_CONTENTS, detail)
    status = decimal_number(data.get("response_status"))
    if status is not None and status >= 400 and not as_row(response).get("error"):
        response = {"error": f"status {status:.0f}"}
    provider = first_text(data, "provider")
    yield from logged_calls(
        row.location,
        read_calls(request, response),
        _helicone_fields(data),
        metadata=without_empty(properties=as_row(parse_if_json(data.get("request_properties")))),
        provider=provider_serving(
            provider.lower() if provider else None, first_text(data, "target_url")
        ),
    )


def _helicone_fields(row: Row) -> Row:
    """Returns the fields of LoggedConversation that Helicone's row gives."""
    begin, end = row.get("request_created_at"), row.get("response_created_at")
    delay = non_negative_number(decimal_number(row.get("delay_ms")))
    fields: dict[str, Any] = without_empty(
        id=first_text(row, "request_id"),
        group=first_text(as_row(parse_if_json(row.get("request_properties"))), *_HELICONE_SESSIONS),
        model=first_text(row, "response_model", "model", "request_model"),
        usage=usage_of(row),
        started_at=iso_time(begin),
        scores=_helicone_scores(row),
    )
    cost = decimal_number(row.get("costUSD", row.get("cost")))
    seconds = seconds_between(begin, end) if delay is None else delay / 1000
    return fields | {"cost_usd": cost, "duration_s": seconds}


def _helicone_scores(row: Row) -> dict[str, float]:
    """Returns the scores of a request; the user's rating is the score `feedback`."""
    scores = numbers_by_name(parse_if_json(row.get("scores")))
    rating = row.get("feedback_rating")
    if rating in (True, False, "true", "false"):
        scores["feedback"] = float(rating in (True, "true"))
    return scores


LITELLM = TraceFormat(
    name="litellm",
    title="LiteLLM: logged payloads and spend logs",
    is_recognised=detect_by_item(_is_litellm_row),
    read=lambda paths: convert_rows(read_any_rows(*paths), _litellm_calls),
)
HELICONE = TraceFormat(
    name="helicone",
    title="Helicone: exported requests",
    is_recognised=detect_by_item(_is_helicone_row, "data"),
    read=_read_helicone,
)

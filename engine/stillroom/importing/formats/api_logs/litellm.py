"""Logs of LiteLLM: the payload that it hands its loggers, and its table of spend.

Source: LiteLLM's StandardLoggingPayload, which its loggers write to buckets and files, and the rows
of LiteLLM_SpendLogs, which hold messages if `store_prompts_in_spend_logs` is on.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stillroom.importing.bodies.envelopes import logged_calls
from stillroom.importing.bodies.exchanges import (
    NO_CALL,
    NO_CONTENTS,
    NO_REPLY,
    ApiCall,
    read_exchanges,
)
from stillroom.importing.bodies.facts import (
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
from stillroom.importing.bodies.raw_calls import (
    MessageMemo,
    RawRequest,
    encoded_metadata,
    raw_reply,
    raw_rows,
)
from stillroom.importing.chat_messages import TRUNCATED
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_row,
    head_rows,
    is_array_file,
    row_of_line,
)
from stillroom.importing.records import (
    NO_TOOLS,
    LoggedConversation,
    Place,
    RawCall,
    RawRow,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.table_rows import csv_head, is_table_file, read_any_rows
from stillroom.lines import Line
from stillroom.types import Usage

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


class _Settings(msgspec.Struct, gc=False):
    model: str | None = None
    tools: msgspec.Raw = NO_TOOLS
    functions: None = None
    messages: None = None
    input: None = None
    system: None = None


class _Metadata(msgspec.Struct, gc=False):
    session_id: str | None = None


class _Payload(msgspec.Struct, gc=False):
    """A payload of a usual call; one in which these fields have other values is read at length."""

    call_type: Literal["completion", "acompletion"]
    messages: list[msgspec.Raw]
    response: dict[str, Any]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)]
    completion_tokens: Annotated[int, msgspec.Meta(ge=0)]
    custom_llm_provider: str | None = None
    response_cost: float | None = None
    status: Literal["success"] | None = None
    model_parameters: _Settings | None = None
    metadata: _Metadata | None = None
    request_tags: list[str] | None = None
    proxy_server_request: None = None
    input_tokens: None = None
    spend: None = None
    response_cost_failure_debug_info: Any = None
    id: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    trace_id: str | None = None
    model: str | None = None
    startTime: float | str | None = None
    endTime: float | str | None = None


_PAYLOAD = msgspec.json.Decoder(_Payload)


def _read_raw(paths: Sequence[Path]) -> Iterator[RawRow]:
    memo = MessageMemo()

    def call_of(path: Path, line: Line) -> RawCall | None:
        data = line.utf8
        row = _PAYLOAD.decode(data)
        settings = row.model_parameters or _Settings()
        # Both are looked for in the whole line, since few have them.
        whole = bytes(data)
        if not row.messages or not row.custom_llm_provider or _REDACTED in whole or _CUT in whole:
            return None
        reply = raw_reply(row.response)
        tags = without_nothing(tags=row.request_tags)
        return RawCall(
            path=path,
            line=line.number,
            messages=[*memo.of_request(RawRequest(row.messages)), *reply.messages],
            tools=settings.tools,
            group=row.session_id or (row.metadata.session_id if row.metadata else None) or None,
            id=row.id or row.request_id or reply.id,
            judged_as=(row.trace_id,) if row.trace_id else (),
            provider=row.custom_llm_provider,
            model=row.model or reply.model or settings.model or None,
            usage=Usage(prompt_tokens=row.prompt_tokens, completion_tokens=row.completion_tokens),
            cost_usd=None if row.response_cost_failure_debug_info else row.response_cost,
            started_at=iso_time(row.startTime) or reply.created,
            duration_s=seconds_between(row.startTime, row.endTime),
            finish_reason=reply.finish_reason,
            metadata=encoded_metadata(reply.details | tags),
        )

    for path in paths:
        if is_table_file(path) or is_array_file(path):
            yield from _read([path])
        else:
            yield from raw_rows([path], call_of, _read_line)


def _read_line(path: Path, line: Line) -> list[SourceRow]:
    return convert_row(row_of_line(path, line), _calls)


LITELLM = TraceFormat(
    name="litellm",
    title="LiteLLM: logged payloads and spend logs",
    is_recognised=_is_recognised,
    read=_read,
    read_raw=_read_raw,
)

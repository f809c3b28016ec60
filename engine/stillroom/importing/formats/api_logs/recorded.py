"""Reads the journals of `stillroom record`, with one recorded call per line."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from stillroom.data.checks import Problem, decode_row
from stillroom.data.row_files import TOO_LONG, read_row_lines
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import (
    NO_REPLY,
    NO_REQUEST,
    failure_text,
    logged_calls,
    read_calls,
)
from stillroom.importing.payloads.fields import iso_time, usage_of, without_empty
from stillroom.importing.payloads.pairs import LoggedPair, ResponseChains
from stillroom.importing.payloads.streams import assemble_reply, stream_events
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.lines import BOM, Line
from stillroom.recording.records import (
    BEGINNING,
    Content,
    RecordedCall,
    RecordedReply,
    decode_call,
)
from stillroom.types import Usage

NOT_A_CALL = "not a recorded call"
TRUNCATED_BODY = "not recorded completely"
_INCOMPLETE = {
    "client_left": "the client disconnected before the end",
    "upstream_left": "the endpoint disconnected before the end",
    "proxy_stopped": "the recorder stopped before the end",
}
_STREAM = "text/event-stream"
_MAX_ERROR_BYTES = 500
_RESPONSES_MARK, _MARK_WITHIN_BYTES = b'"kind":"responses"', 128
"""The bytes that identify a Responses call, and how far into its line they are searched for."""


def _is_recognised(_path: Path, head: bytes) -> bool:
    return head.removeprefix(BOM).lstrip().startswith(BEGINNING)


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    with ResponseChains(lambda: _responses(paths)) as chains:
        for path in paths:
            for line in read_row_lines(path):
                location = Location(path, line.number)
                try:
                    yield from list(_calls(location, line, chains))
                except UnreadableRowError as error:
                    yield RefusedRow(location, error.reason, error.detail)


def recorded_calls(paths: Sequence[Path]) -> Iterator[RecordedCall]:
    """Yields the calls of journals; skips invalid lines."""
    for path in paths:
        for line in read_row_lines(path):
            with suppress(UnreadableRowError):
                yield _decode_line(line)


def _responses(paths: Sequence[Path]) -> Iterator[LoggedPair]:
    """Yields the calls of the Responses API, any of which may continue another one."""
    for path in paths:
        for line in read_row_lines(path):
            if _RESPONSES_MARK in bytes(line.view[:_MARK_WITHIN_BYTES]):
                with suppress(UnreadableRowError):
                    yield _pair(_decode_line(line))


def _calls(location: Location, line: Line, chains: ResponseChains) -> Iterator[LoggedConversation]:
    """Yields the calls in a line. Raises UnreadableRowError if it is invalid or incomplete."""
    call = _decode_line(line)
    pair = _pair(call)
    log_fields = without_empty(
        feedback_ids=(call.id,),
        group=call.session,
        started_at=iso_time(call.started_at),
        duration_s=call.duration_s,
    )
    if call.kind == "responses":
        call_with_history, chain_fields = chains.read_call(pair)
        calls, log_fields = [call_with_history], chain_fields | log_fields
    else:
        calls = read_calls(pair.request, pair.response)
    metadata = without_empty(upstream=call.upstream, first_block_s=call.first_block_s)
    yield from logged_calls(location, calls, log_fields, metadata=metadata, provider=call.provider)


def usage_of_call(call: RecordedCall) -> Usage | None:
    """Returns the usage that a call's reply reports; None if it has none or is incomplete."""
    try:
        usage = usage_of(_reply_body(call).get("usage"))
    except UnreadableRowError:
        return None
    is_plausible = usage is not None and usage.prompt_tokens and usage.completion_tokens
    return usage if is_plausible else None


def _pair(call: RecordedCall) -> LoggedPair:
    return LoggedPair(_body(call.request.content, NO_REQUEST), _reply_body(call), {}, call.path)


def _decode_line(line: Line) -> RecordedCall:
    """Decodes a line of a journal. Raises UnreadableRowError if it is not a recorded call."""
    if line.is_cut:
        raise UnreadableRowError(NOT_A_CALL, f"the line {TOO_LONG}")
    try:
        return decode_call(line.utf8)
    except (ValueError, RecursionError) as error:
        raise UnreadableRowError(NOT_A_CALL, str(error)[:200]) from error


def _reply_body(call: RecordedCall) -> Row:
    """Returns the unstreamed body of the reply, or an object with its `error`.

    Raises UnreadableRowError if the reply is missing or incomplete.
    """
    reply = call.reply
    if reply is None:
        raise UnreadableRowError(_INCOMPLETE.get(call.end, NO_REPLY), call.problem or "")
    if reply.status >= 400:
        return {"error": f"HTTP {reply.status}: {_error_text(reply.content)}"}
    try:
        if _is_stream(reply):
            return assemble_reply(stream_events(_text(reply.content)))
        return _body(reply.content, NO_REPLY)
    except UnreadableRowError as error:
        if call.end == "whole":
            raise
        # The reply may be complete: some programs disconnect before the stream is closed.
        raise UnreadableRowError(_INCOMPLETE[call.end], call.problem or error.detail) from error


def _is_stream(reply: RecordedReply) -> bool:
    kinds = (value for name, value in reply.headers if name.lower() == "content-type")
    return next(kinds, "").lower().startswith(_STREAM)


def _error_text(content: Content) -> str:
    body = decode_row(content.data)
    text = failure_text(body) if isinstance(body, dict) else None
    return text or content.data[:_MAX_ERROR_BYTES].decode("utf-8", "replace").strip()


def _text(content: Content) -> str:
    """Returns a content as text. Raises UnreadableRowError if it is truncated or not UTF-8."""
    if content.cut is not None:
        raise UnreadableRowError(
            TRUNCATED_BODY,
            f"{content.cut}; for larger bodies, set --max-body-mb of `stillroom record`",
        )
    if content.text is None:
        raise UnreadableRowError("not UTF-8 text")
    return content.text


def _body(content: Content, reason: str) -> Row:
    """Parses a recorded content as a JSON object. Raises UnreadableRowError with `reason`."""
    body = decode_row(_text(content).encode())
    if isinstance(body, Problem):
        raise UnreadableRowError(reason, f"the content {body.message}")
    return body


STILLROOM_RECORD = TraceFormat(
    name="stillroom_record",
    title="Calls recorded by `stillroom record`",
    is_recognised=_is_recognised,
    read=_read,
)

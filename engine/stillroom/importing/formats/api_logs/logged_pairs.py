"""Reads logs that have the bodies of a request and of its response in one row.

For OpenAI's chat completions, the messages may also be next to the reply or in the
`chat.completion` object, and a streamed reply may be a list of chunks. Calls of the Responses API
get the history that they continue (`payloads/pairs.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stillroom.data.layouts.foreign import numbers_by_name
from stillroom.importing.formats.datasets.feedback_tables import score_of, scores_in
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    detect_by_row,
    make_row_reader,
    read_json_rows,
)
from stillroom.importing.payloads.calls import (
    NO_REPLY,
    NO_REQUEST,
    ApiCall,
    logged_calls,
    read_calls,
)
from stillroom.importing.payloads.fields import as_list, as_row, parse_if_json
from stillroom.importing.payloads.gemini import gemini_calls, is_gemini
from stillroom.importing.payloads.pairs import (
    LoggedPair,
    ResponseChains,
    envelope_fields,
    envelope_metadata,
    find_pair,
    has_own_reader,
)
from stillroom.importing.payloads.streams import assemble_completion
from stillroom.importing.records import LoggedConversation, RefusedRow, SourceRow, TraceFormat

_CHAT_REPLIES = ("output", "reply")
_STORED_REQUEST_FIELDS = ("model", "instructions", "tools", "previous_response_id", "conversation")
"""The request fields that a stored response repeats."""
_STORED_BODIES = ("response", "input_items", "input")


def _pair_in(row: JsonRow) -> LoggedPair:
    """Returns a row's request and response. Raises UnreadableRowError if it has no request."""
    pair = find_pair(row.data)
    if pair is None:
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` with the request's body")
    return pair


def _is_chat(row: Row) -> bool:
    pair = None if has_own_reader(row) else _chat_pair(row)
    return pair is not None and pair.api == "chat" and "messages" in pair.request


def _chat_pair(row: Row) -> LoggedPair | None:
    """Returns the request and the response of a chat completion in a row; None if it has none."""
    if "choices" in row:
        request = as_row(row.get("request")) or as_row(row.get("input")) or row
        return LoggedPair(request, row, row) if "messages" in request else None
    name = next((name for name in _CHAT_REPLIES if row.get(name)), None)
    if name is not None and isinstance(row.get("messages"), list):
        return LoggedPair(row, row[name], row)
    return find_pair(row)


def _chat_calls(row: JsonRow) -> Iterator[LoggedConversation]:
    pair = _chat_pair(row.data)
    if pair is None:
        raise UnreadableRowError(
            NO_REQUEST, "the row has neither a `request` nor `messages` with a reply"
        )
    log_fields = envelope_fields(pair.envelope) | {"scores": _scores(row.data)}
    calls = read_calls(pair.request, _assemble_chunks(pair.response))
    yield from logged_calls(
        row.location, calls, log_fields, metadata=envelope_metadata(pair.envelope)
    )


def _scores(row: Row) -> dict[str, float]:
    """Returns the scores of a call: `scores` by name, its reward, and its thumb or rating."""
    reward = score_of(row.get("reward"))
    single = scores_in(row) | ({} if reward is None else {"reward": reward})
    return numbers_by_name(as_row(row.get("scores"))) | single


def _assemble_chunks(response: Any) -> Any:
    """Assembles a completion from a list of chunks; returns any other response unchanged."""
    chunks = [as_row(chunk) for chunk in as_list(response)]
    if not any(isinstance(chunk.get("choices"), list) for chunk in chunks):
        return response
    return assemble_completion(chunks, is_complete=False)


def _is_anthropic(row: Row) -> bool:
    pair = None if has_own_reader(row) else find_pair(row)
    return pair is not None and pair.api == "anthropic"


def _pair_calls(
    row: JsonRow, pair: LoggedPair, calls: Iterable[ApiCall], provider: str | None = None
) -> Iterator[LoggedConversation]:
    log_fields, metadata = envelope_fields(pair.envelope), envelope_metadata(pair.envelope)
    return logged_calls(row.location, calls, log_fields, metadata=metadata, provider=provider)


def _anthropic_calls(row: JsonRow) -> Iterator[LoggedConversation]:
    pair = _pair_in(row)
    return _pair_calls(row, pair, read_calls(pair.request, pair.response), "anthropic")


def _is_gemini(row: Row) -> bool:
    pair = None if has_own_reader(row) else find_pair(row)
    return pair is not None and is_gemini(pair.request)


def _gemini_calls(row: JsonRow) -> Iterator[LoggedConversation]:
    pair = find_pair(row.data)
    if pair is None or not is_gemini(pair.request):
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` with `contents`")
    calls = gemini_calls(pair.request, pair.response, pair.path)
    return _pair_calls(row, pair, calls, "google")


def _is_response(row: Row) -> bool:
    if has_own_reader(row):
        return False
    if row.get("object") == "response":
        return True
    pair = find_pair(row)
    if pair is None or pair.api != "responses":
        return False
    is_response = as_row(pair.response).get("object") == "response"
    return is_response or bool(pair.path) or "model" in pair.request


def _response_pair(row: Row) -> LoggedPair | None:
    """Returns the request and the response of a row; None if it has none.

    A stored response repeats most of its request, but its input is in the row's `input_items` or
    `input`.
    """
    response = as_row(parse_if_json(row.get("response")))
    stored = row if row.get("object") == "response" else response
    items = parse_if_json(row.get("input_items", row.get("input", stored.get("input"))))
    if stored and not as_row(parse_if_json(row.get("request"))) and items is not None:
        listed = as_list(as_row(items).get("data")) if isinstance(items, dict) else items
        request = {
            key: stored.get(key) for key in _STORED_REQUEST_FIELDS if stored.get(key) is not None
        }
        envelope = {} if stored is row else {k: row[k] for k in row if k not in _STORED_BODIES}
        return LoggedPair(request | {"input": _oldest_first(listed)}, stored, envelope)
    return None if stored is row else find_pair(row)


def _oldest_first(items: Any) -> Any:
    """Returns items in the order in which they were sent; the API may list the newest first.

    A tool call precedes its output, so that an output before its call shows the reversed order.
    """
    if not isinstance(items, list):
        return items
    called: set[Any] = set()
    for item in map(as_row, as_list(items)):
        if item.get("type") == "function_call":
            called.add(item.get("call_id"))
        elif item.get("type") == "function_call_output" and item.get("call_id") not in called:
            later = (as_row(other) for other in as_list(items))
            is_called = any(
                other.get("type") == "function_call" and other.get("call_id") == item["call_id"]
                for other in later
                if "call_id" in item
            )
            return as_list(items)[::-1] if is_called else items
    return items


def _read_responses(paths: Sequence[Path]) -> Iterator[SourceRow]:
    with ResponseChains(lambda: _response_pairs(paths)) as chains:
        rows = read_json_rows(*paths)
        yield from convert_rows(rows, lambda row: _response_calls(row, chains))


def _response_pairs(paths: Sequence[Path]) -> Iterator[LoggedPair]:
    for row in read_json_rows(*paths):
        if not isinstance(row, RefusedRow) and (pair := _response_pair(row.data)) is not None:
            yield pair


def _response_calls(row: JsonRow, chains: ResponseChains) -> Iterator[SourceRow]:
    """Yields the Responses call in a row, with the history that it continues."""
    pair = _response_pair(row.data)
    if pair is None and (row.data.get("object") == "response" or as_row(row.data.get("response"))):
        detail = "add its input items to the row as `input_items`"
        raise UnreadableRowError("a response without its input", detail)
    pair = pair or _pair_in(row)
    if pair.response is None:
        raise UnreadableRowError(NO_REPLY, "the row has no `response`")
    call, chain_fields = chains.read_call(pair)
    log_fields = envelope_fields(pair.envelope) | chain_fields
    yield from logged_calls(row.location, [call], log_fields, provider="openai")


OPENAI_CHAT = TraceFormat(
    name="openai_chat",
    title="OpenAI chat completions: requests and responses",
    is_recognised=detect_by_row(_is_chat),
    read=make_row_reader(_chat_calls),
)
ANTHROPIC_MESSAGES = TraceFormat(
    name="anthropic_messages",
    title="Anthropic Messages: requests and responses",
    is_recognised=detect_by_row(_is_anthropic),
    read=make_row_reader(_anthropic_calls),
)
GEMINI = TraceFormat(
    name="gemini",
    title="Gemini generateContent: requests and responses",
    is_recognised=detect_by_row(_is_gemini),
    read=make_row_reader(_gemini_calls),
)
OPENAI_RESPONSES = TraceFormat(
    name="openai_responses",
    title="OpenAI Responses: stored responses, or requests and responses",
    is_recognised=detect_by_row(_is_response),
    read=_read_responses,
)

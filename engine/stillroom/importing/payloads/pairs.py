"""Finds the request and response in a logged row, and restores the history of Responses calls.

With `previous_response_id` or `conversation`, a Responses call sends only its new messages. The
messages of the calls that it continues are added before them, so that each row has its whole
history like the rows of other logs. As in the API, instructions do not carry over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from stillroom import bounds
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import (
    ApiCall,
    read_calls,
    responses_messages,
    system_message,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    is_id_name,
    iso_time,
    leaves,
    non_negative_number,
    parse_if_json,
    seconds_between,
    text_of,
    without_empty,
)
from stillroom.importing.payloads.messages import MessageReader
from stillroom.importing.payloads.streams import assemble_if_streamed
from stillroom.importing.spill import DiskDict

Api = Literal["chat", "responses", "anthropic"]
_REQUESTS = ("request", "request_body", "requestBody", "params", "kwargs")
_RESPONSES = ("response", "response_body", "responseBody", "completion", "message", "result")
_BEGINNINGS = ("started_at", "start_time", "startTime", "timestamp", "created_at", "time")
_ENDS = ("ended_at", "end_time", "endTime", "finished_at", "completed_at")
_SESSIONS = (
    "session_id", "sessionId", "conversation_id", "conversationId", "thread_id", "group_id",
    "chat_id", "session", "conversation", "thread",
)  # fmt: skip
_OWN_FORMAT_FIELDS = frozenset(
    {
        "stillroom_record",
        "custom_id",
        "call_type",
        "custom_llm_provider",
        "run_type",
        "traceId",
        "request_created_at",
        "responses_create_params",
        "resourceSpans",
    }
)
"""Fields of Stillroom's recordings, batches, LiteLLM, LangSmith, Langfuse, Helicone, NeMo Gym and
OTLP."""
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "image", "document"})


@dataclass(frozen=True, slots=True)
class LoggedPair:
    """A request and its response, with the other fields of their row."""

    request: Row
    response: Any
    envelope: Row
    """The other fields of the row, such as its id and times."""
    path: str = ""
    """The path or URL that was called; empty if unknown."""

    @property
    def api(self) -> Api:
        """The API that was called, inferred from the bodies and the path."""
        return api_of(self.request, self.response, self.path)


def has_own_reader(row: Row) -> bool:
    """Returns whether a row is in the format of a tool that has its own reader."""
    return not _OWN_FORMAT_FIELDS.isdisjoint(row)


def find_pair(row: Row) -> LoggedPair | None:
    """Returns the request and the response in a row; None if it has no request.

    Bodies may be JSON text, or under `body` next to headers and a URL. The fields of the request
    may also be in the row itself, next to the response.
    """
    request_field = next((name for name in _REQUESTS if as_row(parse_if_json(row.get(name)))), None)
    response_field = next((name for name in _RESPONSES if row.get(name) not in (None, "")), None)
    if request_field is None:
        is_flat = response_field is not None and ("messages" in row or "input" in row)
        if not is_flat:
            return None
        envelope = {key: row[key] for key in row if key in (*_BEGINNINGS, *_ENDS, *_SESSIONS, "id")}
        request, path = row, ""
    else:
        logged = as_row(parse_if_json(row[request_field]))
        request = as_row(parse_if_json(logged.get("body"))) or logged
        path = first_text(logged, "path", "url", "endpoint") or ""
        envelope = {key: row[key] for key in row if key not in (request_field, response_field)}
    path = path or first_text(row, "path", "url", "endpoint") or ""
    return LoggedPair(request, _response_body(row, response_field), envelope, path)


def _response_body(row: Row, name: str | None) -> Any:
    """Returns the body of the response in a field of a row, assembled if it was streamed."""
    if name is None:
        return {"error": row["error"]} if row.get("error") else None
    response = parse_if_json(row[name])
    body = parse_if_json(as_row(response).get("body")) or response
    try:
        return assemble_if_streamed(body)
    except UnreadableRowError:
        return body  # it is refused when it is parsed


def api_of(request: Row, response: Any = None, path: str = "") -> Api:
    """Returns the API of a request and its response: chat completions if nothing else fits."""
    reply = as_row(response)
    if "choices" in reply:
        return "chat"
    if reply.get("object") == "response" or isinstance(reply.get("output"), list):
        return "responses"
    if reply.get("type") == "message" and reply.get("role") == "assistant":
        return "anthropic"
    if path:
        apis_by_suffix = {
            "/responses": "responses",
            "/messages": "anthropic",
            "/completions": "chat",
        }
        plain = path.partition("?")[0].rstrip("/")
        for suffix, api in apis_by_suffix.items():
            if plain.endswith(suffix):
                return api  # pyright: ignore[reportReturnType]
    if "messages" not in request:
        return "responses" if "input" in request else "chat"
    return "anthropic" if _looks_like_anthropic(request) else "chat"


def _looks_like_anthropic(request: Row) -> bool:
    """Returns whether a request with messages is one of Anthropic's Messages API."""
    if "system" in request or "anthropic_version" in request or "stop_sequences" in request:
        return True
    if any("input_schema" in as_row(tool) for tool in as_list(request.get("tools"))):
        return True
    blocks = (
        as_row(block).get("type")
        for message in as_list(request.get("messages"))
        for block in as_list(as_row(message).get("content"))
    )
    return any(isinstance(kind, str) and kind in _ANTHROPIC_BLOCKS for kind in blocks)


def envelope_fields(envelope: Row) -> Row:
    """Converts an envelope to fields of LoggedConversation, such as its id and times."""
    begin = next((envelope[name] for name in _BEGINNINGS if envelope.get(name)), None)
    end = next((envelope[name] for name in _ENDS if envelope.get(name)), None)
    seconds = non_negative_number(envelope.get("duration_s"))
    for name in ("duration_ms", "latency_ms", "delay_ms"):
        if seconds is None and (number := non_negative_number(envelope.get(name))) is not None:
            seconds = number / 1000
    fields = without_empty(
        id=first_text(envelope, "id", "request_id", "call_id"),
        group=first_text(envelope, *_SESSIONS)
        or first_text(as_row(envelope.get("metadata")), *_SESSIONS),
        started_at=iso_time(begin),
        ids={name: text for name, text in leaves(envelope, levels=0) if is_id_name(name)},
    )
    if seconds is None:
        seconds = seconds_between(begin, end)
    cost = decimal_number(envelope.get("cost_usd", envelope.get("cost")))
    return fields | {
        name: number
        for name, number in (("duration_s", seconds), ("cost_usd", cost))
        if number is not None
    }


def envelope_metadata(envelope: Row) -> Row:
    """Returns the metadata and tags of a row."""
    return without_empty(
        metadata=as_row(envelope.get("metadata")), tags=as_list(envelope.get("tags"))
    )


EARLIER_DROPPED = "earlier messages are not in the log"
_MAX_LINKS = bounds.RESPONSES.limit


class ResponseChains:
    """Finds the history of each response in a source; `pairs` returns an iterator over all of them.

    It is a context manager: it keeps the messages of continued responses in a temporary file.
    """

    def __init__(self, pairs: Callable[[], Iterator[LoggedPair]]) -> None:
        self._pairs = pairs
        self._parents = _parents(pairs())
        self._messages = DiskDict[str]()

    def __enter__(self) -> Self:
        self._messages.__enter__()
        continued = set(self._parents.values())
        for pair in self._pairs() if continued else ():
            if text_of(as_row(pair.response).get("id")) in continued:
                self._store(pair)
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.__exit__(*_)

    def read_call(self, pair: LoggedPair) -> tuple[ApiCall, Row]:
        """Returns a call with its whole history, and its id, group and parent as fields.

        Raises UnreadableRowError if the bodies are not a model call.
        """
        call = read_calls(pair.request, pair.response)[0]
        parent = self._parents.get(call.id or "", _text_field(pair, "previous_response_id"))
        earlier, dropped = self._history(parent)
        first = len(system_message(pair.request.get("instructions"), MessageReader()))
        messages = call.messages
        if messages[first : first + len(earlier)] != earlier:
            messages = [*messages[:first], *earlier, *messages[first:]]
        with_history = replace(
            call,
            messages=messages,
            dropped=tuple(dict.fromkeys([*dropped, *call.dropped])),
            metadata=call.metadata | as_row(as_row(pair.response).get("metadata")),
        )
        return with_history, without_empty(id=call.id, group=_conversation(pair), parent=parent)

    def _store(self, pair: LoggedPair) -> None:
        """Stores the new messages and the reply of a response that another one continues."""
        response, reader = as_row(pair.response), MessageReader()
        try:
            sent = responses_messages(pair.request.get("input"), reader)
            reply = responses_messages(response.get("output"), reader, role="assistant")
        except UnreadableRowError:
            return  # its row is refused, and later rows note that earlier messages are missing
        self._messages.add(response["id"], [sent, reply, list(reader.dropped)])

    def _history(self, parent: str | None) -> tuple[list[Row], list[str]]:
        """Returns the messages up to the response `parent`, and what was dropped from them."""
        links: list[list[Any]] = []
        dropped: list[str] = []
        seen: set[str] = set()
        while parent is not None:
            is_cycle = parent in seen or len(seen) == _MAX_LINKS
            link = None if is_cycle else self._messages.get(parent)
            if link is None:
                dropped.append(EARLIER_DROPPED)
                break
            seen.add(parent)
            links.append(link)
            parent = self._parents.get(parent)
        messages: list[Row] = []
        for sent, reply, dropped_of_link in reversed(links):
            # Some clients send the whole history together with previous_response_id.
            repeats = bool(messages) and sent[: len(messages)] == messages
            messages = [*sent, *reply] if repeats else [*messages, *sent, *reply]
            dropped += dropped_of_link
        return messages, dropped


def _parents(pairs: Iterator[LoggedPair]) -> dict[str, str]:
    """Returns the previous response's id for each response that continues another one."""
    parents: dict[str, str] = {}
    conversations: dict[str, list[tuple[float, int, str]]] = {}
    for number, pair in enumerate(pairs):
        response = as_row(pair.response)
        response_id = text_of(response.get("id"))
        if response_id is None:
            continue
        if (parent := _text_field(pair, "previous_response_id")) is not None:
            parents[response_id] = parent
        elif (conversation := _conversation(pair)) is not None:
            created = response.get("created_at")
            moment = float(created) if isinstance(created, int | float) else 0.0
            members = conversations.setdefault(conversation, [])
            members.append((moment, number, response_id))
    for members in conversations.values():
        ids = [response_id for _, _, response_id in sorted(members)]
        parents |= dict(zip(ids[1:], ids, strict=False))
    return parents


def _text_field(pair: LoggedPair, name: str) -> str | None:
    """Returns a text field of the request, or else of the response; None if neither has it."""
    return first_text(pair.request, name) or first_text(as_row(pair.response), name)


def _conversation(pair: LoggedPair) -> str | None:
    """Returns the id of the conversation to which a call belongs; None if it names none."""
    for body in (pair.request, as_row(pair.response)):
        value = body.get("conversation")
        conversation_id = text_of(value) or text_of(as_row(value).get("id"))
        if conversation_id is not None:
            return conversation_id
    return None

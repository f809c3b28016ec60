"""Finds the request and the response of a call in a logged row, and the responses it continues.

A response of the Responses API that continues another one by `previous_response_id`, or within a
`conversation`, was sent only what is new. The messages of the earlier responses are put before it,
so that its row holds its whole history as the rows of other logs do. Instructions are not carried
over, as the API does not carry them over either.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from stillroom import bounds
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import ApiCall, input_messages, read_calls, system_message
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    is_id_name,
    iso_time,
    leaves,
    parsed,
    positive_number,
    seconds_between,
    text_of,
    without_nothing,
)
from stillroom.importing.payloads.messages import MessageReader
from stillroom.importing.payloads.streams import unstreamed
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
_MARKS = frozenset(
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
"""Fields of our recordings, batches, LiteLLM, LangSmith, Langfuse, Helicone, NeMo Gym and OTLP."""
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "image", "document"})


@dataclass(frozen=True, slots=True)
class LoggedPair:
    """A request and its response with the row that holds them."""

    request: Row
    response: Any
    envelope: Row
    """The rest of the row."""
    path: str = ""
    """The path or address that was called, as far as the row says it."""

    @property
    def api(self) -> Api:
        """The API that was called, judged by the bodies."""
        return api_of(self.request, self.response, self.path)


def is_of_another_tool(row: Row) -> bool:
    """Returns whether a row with a request and a response is that of a tool with its own reader."""
    return not _MARKS.isdisjoint(row)


def find_pair(row: Row) -> LoggedPair | None:
    """Returns the request and the response that a row holds; None if it holds no request.

    Bodies may be JSON text, and may be under `body` with headers and an address. The fields of
    the request may also be in the row itself, next to the response.
    """
    name = next((name for name in _REQUESTS if as_row(parsed(row.get(name)))), None)
    answer = next((name for name in _RESPONSES if row.get(name) not in (None, "")), None)
    if name is None:
        is_flat = answer is not None and ("messages" in row or "input" in row)
        if not is_flat:
            return None
        rest = {key: row[key] for key in row if key in (*_BEGINNINGS, *_ENDS, *_SESSIONS, "id")}
        request, path = row, ""
    else:
        whole = as_row(parsed(row[name]))
        request = as_row(parsed(whole.get("body"))) or whole
        path = first_text(whole, "path", "url", "endpoint") or ""
        rest = {key: item for key, item in row.items() if key not in (name, answer)}
    path = path or first_text(row, "path", "url", "endpoint") or ""
    return LoggedPair(request, _response_body(row, answer), rest, path)


def _response_body(row: Row, name: str | None) -> Any:
    if name is None:
        return {"error": row["error"]} if row.get("error") else None
    response = parsed(row[name])
    body = parsed(as_row(response).get("body"))
    whole = body or response
    try:
        return unstreamed(whole)
    except UnreadableRowError:
        return whole  # it is refused when it is read


def api_of(request: Row, response: Any = None, path: str = "") -> Api:
    """Returns the API to which a request and its response belong; chat completions in doubt."""
    reply = as_row(response)
    if "choices" in reply:
        return "chat"
    if reply.get("object") == "response" or isinstance(reply.get("output"), list):
        return "responses"
    if reply.get("type") == "message" and reply.get("role") == "assistant":
        return "anthropic"
    if path:
        ends = {"/responses": "responses", "/messages": "anthropic", "/completions": "chat"}
        plain = path.partition("?")[0].rstrip("/")
        for end, api in ends.items():
            if plain.endswith(end):
                return api  # pyright: ignore[reportReturnType]
    if "messages" not in request:
        return "responses" if "input" in request else "chat"
    return "anthropic" if _looks_like_anthropic(request) else "chat"


def _looks_like_anthropic(request: Row) -> bool:
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
    """Returns what the other fields of the row say, as fields of a logged conversation."""
    begin = next((envelope[name] for name in _BEGINNINGS if envelope.get(name)), None)
    end = next((envelope[name] for name in _ENDS if envelope.get(name)), None)
    seconds = positive_number(envelope.get("duration_s"))
    for name in ("duration_ms", "latency_ms", "delay_ms"):
        if seconds is None and (number := positive_number(envelope.get(name))) is not None:
            seconds = number / 1000
    known = without_nothing(
        id=first_text(envelope, "id", "request_id", "call_id"),
        group=first_text(envelope, *_SESSIONS)
        or first_text(as_row(envelope.get("metadata")), *_SESSIONS),
        started_at=iso_time(begin),
        ids={name: text for name, text in leaves(envelope, levels=0) if is_id_name(name)},
    )
    if seconds is None:
        seconds = seconds_between(begin, end)
    cost = decimal_number(envelope.get("cost_usd", envelope.get("cost")))
    return known | {
        name: number
        for name, number in (("duration_s", seconds), ("cost_usd", cost))
        if number is not None
    }


def envelope_metadata(envelope: Row) -> Row:
    """Returns what the other fields of the row hold of no fixed meaning."""
    return without_nothing(
        metadata=as_row(envelope.get("metadata")), tags=as_list(envelope.get("tags"))
    )


EARLIER_LOST = "earlier messages are not in the log"
_MOST_LINKS = bounds.RESPONSES.most


class ResponseChains:
    """Which responses of a source continue which; `pairs` gives all of them, each time anew.

    The messages of those that are continued are in a file that is gone when the block ends.
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
                self._keep(pair)
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.__exit__(*_)

    def call(self, pair: LoggedPair) -> tuple[ApiCall, Row]:
        """Returns a call with its whole history, and its place in that as fields of a row.

        Raises UnreadableRowError if the bodies are not those of a call.
        """
        call = read_calls(pair.request, pair.response)[0]
        parent = self._parents.get(call.id or "", _field(pair, "previous_response_id"))
        earlier, losses = self._history(parent)
        first = len(system_message(pair.request.get("instructions"), MessageReader()))
        messages = call.messages
        if messages[first : first + len(earlier)] != earlier:
            messages = [*messages[:first], *earlier, *messages[first:]]
        whole = replace(
            call,
            messages=messages,
            losses=tuple(dict.fromkeys([*losses, *call.losses])),
            metadata=call.metadata | as_row(as_row(pair.response).get("metadata")),
        )
        return whole, without_nothing(id=call.id, group=_conversation(pair), parent=parent)

    def _keep(self, pair: LoggedPair) -> None:
        response, reader = as_row(pair.response), MessageReader()
        try:
            given = input_messages(pair.request.get("input"), reader)
            reply = input_messages(response.get("output"), reader)
        except UnreadableRowError:
            return  # its own row is refused, and the rows after it say what they lack
        self._messages.add(response["id"], [given, reply, list(reader.losses)])

    def _history(self, parent: str | None) -> tuple[list[Row], list[str]]:
        """Returns the messages before a response, and what they lack."""
        links: list[list[Any]] = []
        losses: list[str] = []
        seen: set[str] = set()
        while parent is not None:
            link = (
                None if parent in seen or len(seen) == _MOST_LINKS else self._messages.get(parent)
            )
            if link is None:
                losses.append(EARLIER_LOST)
                break
            seen.add(parent)
            links.append(link)
            parent = self._parents.get(parent)
        messages: list[Row] = []
        for given, reply, lost in reversed(links):
            # A response may have been sent its whole history although it names the one before it.
            repeats = bool(messages) and given[: len(messages)] == messages
            messages = [*given, *reply] if repeats else [*messages, *given, *reply]
            losses += lost
        return messages, losses


def _parents(pairs: Iterator[LoggedPair]) -> dict[str, str]:
    """Returns the id of each response that continues another one, with that one's id."""
    parents: dict[str, str] = {}
    conversations: dict[str, list[tuple[float, int, str]]] = {}
    for number, pair in enumerate(pairs):
        response = as_row(pair.response)
        own = text_of(response.get("id"))
        if own is None:
            continue
        if (parent := _field(pair, "previous_response_id")) is not None:
            parents[own] = parent
        elif (conversation := _conversation(pair)) is not None:
            created = response.get("created_at")
            moment = float(created) if isinstance(created, int | float) else 0.0
            conversations.setdefault(conversation, []).append((moment, number, own))
    for members in conversations.values():
        ids = [own for _, _, own in sorted(members)]
        parents |= dict(zip(ids[1:], ids, strict=False))
    return parents


def _field(pair: LoggedPair, name: str) -> str | None:
    return first_text(pair.request, name) or first_text(as_row(pair.response), name)


def _conversation(pair: LoggedPair) -> str | None:
    for body in (pair.request, as_row(pair.response)):
        value = body.get("conversation")
        found = text_of(value) or text_of(as_row(value).get("id"))
        if found is not None:
            return found
    return None

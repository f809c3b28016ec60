"""Logs of OpenAI's Responses: stored responses with their input items, and logged pairs.

A response that continues another one by `previous_response_id`, or within a `conversation`, was
sent only what is new. The messages of the earlier responses are put before it, so that its row
holds its whole history as the rows of other logs do. Instructions are not carried over, as the API
does not carry them over either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.importing.bodies.blocks import BlockReader
from stillroom.importing.bodies.envelopes import (
    LoggedPair,
    envelope_facts,
    find_pair,
    is_of_another_tool,
    logged_calls,
)
from stillroom.importing.bodies.exchanges import (
    NO_REPLY,
    NO_REQUEST,
    input_messages,
    read_exchanges,
    system_message,
)
from stillroom.importing.bodies.facts import as_list, as_row, first_text, parsed, text_of
from stillroom.importing.bodies.shelf import Shelf
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    head_rows,
    read_json_rows,
)
from stillroom.importing.records import Refusal, SourceRow, TraceFormat

EARLIER_LOST = "earlier messages are not in the log"
_MOST_LINKS = 10_000


@dataclass(slots=True)
class _Chains:
    """Which response continues which, and the new messages of those that are continued."""

    parents: dict[str, str] = field(default_factory=dict[str, str])
    """The id of each response that continues another one, with that one's id."""
    messages: Shelf[str] = field(default_factory=Shelf[str])
    """The new messages of the responses that are continued, with their losses."""


def _is_recognised(_path: Path, head: bytes) -> bool:
    return any(_is_call(row) for row in head_rows(head))


def _is_call(row: Row) -> bool:
    if is_of_another_tool(row):
        return False
    if row.get("object") == "response":
        return True
    pair = find_pair(row)
    return pair is not None and pair.api == "responses"


def _pair_of(row: Row) -> LoggedPair | None:
    """Returns the request and the response of a row.

    A stored response repeats most of its request; what it was sent stands beside it as
    `input_items`, or as `input`.
    """
    response = as_row(parsed(row.get("response")))
    stored = row if row.get("object") == "response" else response
    items = parsed(row.get("input_items", row.get("input", stored.get("input"))))
    if stored and not as_row(parsed(row.get("request"))) and items is not None:
        listed = as_list(as_row(items).get("data")) if isinstance(items, dict) else items
        request = {key: stored.get(key) for key in _REPEATED if stored.get(key) is not None}
        envelope = {} if stored is row else {k: row[k] for k in row if k not in _BODIES}
        return LoggedPair(request | {"input": _oldest_first(listed)}, stored, envelope)
    return None if stored is row else find_pair(row)


_REPEATED = ("model", "instructions", "tools", "previous_response_id", "conversation")
_BODIES = ("response", "input_items", "input")


def _oldest_first(items: Any) -> Any:
    """Returns items in the order in which they were sent; the API lists the newest first."""
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


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    chains = _Chains(_parents(paths))
    with chains.messages:
        _shelve(paths, chains)
        yield from convert_rows(paths, lambda row: _calls(row, chains))


def _pairs(paths: Sequence[Path]) -> Iterator[LoggedPair]:
    for path in paths:
        for row in read_json_rows(path):
            if not isinstance(row, Refusal) and (pair := _pair_of(row.data)) is not None:
                yield pair


def _parents(paths: Sequence[Path]) -> dict[str, str]:
    """Returns which response continues which."""
    parents: dict[str, str] = {}
    conversations: dict[str, list[tuple[float, int, str]]] = {}
    for number, pair in enumerate(_pairs(paths)):
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


def _shelve(paths: Sequence[Path], chains: _Chains) -> None:
    """Keeps the new messages of the responses that others continue."""
    continued = set(chains.parents.values())
    for pair in _pairs(paths) if continued else ():
        response = as_row(pair.response)
        if response.get("id") in continued:
            reader = BlockReader()
            try:
                given = input_messages(pair.request.get("input"), reader)
                reply = input_messages(response.get("output"), reader)
            except UnreadableRowError:
                continue  # its own row is refused, and the rows after it say what they lack
            chains.messages.put(response["id"], [given, reply, list(reader.losses)])


def _calls(row: JsonRow, chains: _Chains) -> Iterator[SourceRow]:
    pair = _pair_of(row.data)
    if pair is None:
        if row.data.get("object") == "response" or as_row(row.data.get("response")):
            detail = "add its input items to the row as `input_items`"
            raise UnreadableRowError("a response without its input", detail)
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` with the request's body")
    if pair.response is None:
        raise UnreadableRowError(NO_REPLY, "the row has no `response`")
    exchange = read_exchanges(pair.request, pair.response)[0].facts()
    own = exchange["id"]
    parent = chains.parents.get(own, _field(pair, "previous_response_id"))
    earlier, losses = _history(parent, chains)
    first = len(system_message(pair.request.get("instructions"), BlockReader()))
    messages: list[Row] = exchange["messages"]
    if messages[first : first + len(earlier)] != earlier:
        messages = [*messages[:first], *earlier, *messages[first:]]
    exchange |= {
        "messages": messages,
        "losses": tuple(dict.fromkeys([*losses, *exchange["losses"]])),
        "metadata": exchange["metadata"] | as_row(as_row(pair.response).get("metadata")),
    }
    facts = envelope_facts(pair.envelope)
    facts |= {"id": own} if own else {}
    facts |= {"group": group} if (group := _conversation(pair)) else {}
    facts |= {"parent": parent} if parent else {}
    yield from logged_calls(row.place, [exchange], facts, {}, "openai")


def _history(parent: str | None, chains: _Chains) -> tuple[list[Row], list[str]]:
    """Returns the messages before a response, and what they lack."""
    links: list[list[Any]] = []
    losses: list[str] = []
    seen: set[str] = set()
    while parent is not None:
        link = None if parent in seen or len(seen) == _MOST_LINKS else chains.messages.get(parent)
        if link is None:
            losses.append(EARLIER_LOST)
            break
        seen.add(parent)
        links.append(link)
        parent = chains.parents.get(parent)
    messages: list[Row] = []
    for given, reply, lost in reversed(links):
        # A response may have been sent its whole history although it names the one before it.
        repeats = bool(messages) and given[: len(messages)] == messages
        messages = [*given, *reply] if repeats else [*messages, *given, *reply]
        losses += lost
    return messages, losses


OPENAI_RESPONSES = TraceFormat(
    name="openai_responses",
    title="OpenAI Responses: stored responses, or requests and responses",
    is_recognised=_is_recognised,
    read=_read,
)

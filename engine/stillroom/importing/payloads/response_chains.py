"""Puts before each response of the Responses API the messages of those that it continues.

A response that continues another one by `previous_response_id`, or within a `conversation`, was
sent only what is new. The messages of the earlier responses are put before it, so that its row
holds its whole history as the rows of other logs do. Instructions are not carried over, as the API
does not carry them over either.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.blocks import BlockReader
from stillroom.importing.payloads.calls import ApiCall, input_messages, read_calls, system_message
from stillroom.importing.payloads.fields import as_row, first_text, text_of, without_nothing
from stillroom.importing.payloads.pairs import LoggedPair
from stillroom.importing.spill import DiskDict

EARLIER_LOST = "earlier messages are not in the log"
_MOST_LINKS = 10_000


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
        first = len(system_message(pair.request.get("instructions"), BlockReader()))
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
        response, reader = as_row(pair.response), BlockReader()
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

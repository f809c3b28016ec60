"""Joins calls that repeat their history: a tree of messages in which each call is a path.

A call whose messages begin with all of an earlier call's, its reply included, ends further down on
the same path. So the calls that end where nothing follows are conversations, and the calls on the
way there are parts of them. Two calls of a group agree in a message if its role, text and tool
calls do; the tool that a result belongs to is known by the number of its call and not by its id.
"""

from array import array
from collections.abc import Iterator, Sequence

from stillroom.importing.conversations.message_store import (
    ASSISTANT,
    REMEMBERED,
    TOOL,
    USER,
    MessageStore,
    RecentNumbers,
)
from stillroom.importing.json_rows import UnreadableRowError

NONE = -1
_USUALLY_NEW = (2, 1, 3, 4, 5, 6, 7)
"""How many messages may follow the beginning of a request that is looked for, most usual first."""
ORPHAN = "a tool's message answers no tool call"


class CallTree:
    """The messages of all calls as a tree; a node is a message after exactly those before it."""

    def __init__(self, store: MessageStore, *, remembered: int = REMEMBERED) -> None:
        self._store = store
        self._by_path: dict[int, int] = {}
        self._by_request = RecentNumbers(remembered)
        self._parents, self._messages = array("i"), array("I")
        self._results, self._has_user = array("i"), array("B")
        self._paths, self._num_calls = array("q"), array("I")
        self._first_rows, self._next_rows, self._replies = array("i"), array("i"), array("i")
        columns = (self._parents, self._messages, self._results, self._has_user, self._paths,
                   self._num_calls, self._first_rows, self._replies)  # fmt: skip
        self._appends = tuple([column.append for column in columns])

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self._parents)

    def add(self, group: str | None, messages: Sequence[int], row: int) -> int:
        """Adds a call, given by the numbers of its messages; returns the node where it ends.

        Raises UnreadableRowError if a tool's message answers no call of the conversation.
        """
        request = tuple(messages[:-1])
        known, node = self._known_beginning(group, request)
        try:
            node = self._extend(group, node, messages[known:])
        except UnreadableRowError:
            if known == 0:
                raise
            # The result of a call that is further back than the last messages.
            node = self._extend(group, NONE, messages)
        self._by_request[hash((group, request))] = self._parents[node]
        self._end_row(node, row, messages[-1])
        return node

    def _known_beginning(self, group: str | None, request: tuple[int, ...]) -> tuple[int, int]:
        """Returns how many messages of a request are an earlier one's, and the node of the last.

        Most calls repeat the request before them and add a reply, and results or a question.
        """
        for num_new in _USUALLY_NEW:
            if num_new < len(request):
                node = self._by_request.get(hash((group, request[:-num_new])))
                if node is not None:
                    return len(request) - num_new, node
        return 0, NONE

    def _extend(self, group: str | None, node: int, messages: Sequence[int]) -> int:
        """Returns the node after further messages, which follow a node (NONE: nothing)."""
        store, by_path = self._store, self._by_path
        roles, digests = store.roles, store.digests
        path = hash(("group", group)) if node == NONE else self._paths[node]
        num_calls = 0 if node == NONE else self._num_calls[node]
        numbers: dict[int, int] = {}
        for message in messages:
            role, result = roles[message], NONE
            if role == ASSISTANT:
                for call in store.calls(message):
                    numbers[call] = num_calls
                    num_calls += 1
            elif role == TOOL:
                result = self._number_of_call(message, numbers)
            path = hash((path, digests[message], result))
            found = by_path.get(path)
            if found is None:
                found = by_path[path] = len(self._parents)
                has_user = role == USER or (node != NONE and self._has_user[node])
                row = (node, message, result, has_user, path, num_calls, NONE, NONE)
                for append, value in zip(self._appends, row, strict=True):
                    append(value)
            node = found
        return node

    def _number_of_call(self, message: int, numbers: dict[int, int]) -> int:
        """Returns which of the conversation's calls a tool's message answers; NONE if it is mute.

        Raises UnreadableRowError if it names none of them.
        """
        answered = self._store.answered[message]
        if answered == 0:
            return NONE
        number = numbers.get(answered)
        if number is None:
            raise UnreadableRowError(ORPHAN, "its call was cut off the history, or has another id")
        return number

    def _end_row(self, node: int, row: int, reply: int) -> None:
        while len(self._next_rows) <= row:
            self._next_rows.append(NONE)
        best = self._replies[node]
        if best == NONE or self._store.sizes[reply] > self._store.sizes[best]:
            self._replies[node] = reply
        first = self._first_rows[node]
        if first == NONE:
            self._first_rows[node] = row
            return
        self._next_rows[row] = self._next_rows[first]
        self._next_rows[first] = row

    def rows_at(self, node: int) -> Iterator[int]:
        """Yields the rows of the calls that end at a node: the first one, then the others."""
        row = self._first_rows[node]
        while row != NONE:
            yield row
            row = self._next_rows[row]

    def first_row(self, node: int) -> int:
        """Returns the row of the first call that ends at a node; NONE if none does."""
        return self._first_rows[node]

    def path_to(self, node: int) -> list[int]:
        """Returns the nodes from the first message to this one."""
        path: list[int] = []
        while node != NONE:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def parent(self, node: int) -> int:
        """Returns the node before a node; NONE for the first message."""
        return self._parents[node]

    def message(self, node: int) -> int:
        """Returns the number of the message at a node, in the form that was seen first.

        Of a reply that was logged as one, it is the longest form of the reply itself, which has
        what histories leave out, such as reasoning.
        """
        reply = self._replies[node]
        return self._messages[node] if reply == NONE else reply

    def result_of(self, node: int) -> int:
        """Returns which of the conversation's calls the tool's message at a node answers."""
        return self._results[node]

    def has_user(self, node: int) -> bool:
        """Returns whether a user has spoken up to a node."""
        return bool(self._has_user[node])

    def ends(self) -> list[int]:
        """Returns the nodes where a call ends and that no later call has on its path."""
        first, parents = self._first_rows, self._parents
        is_passed = bytearray(len(parents))
        ends: list[int] = []
        # A node is added after the one before it, so that going back meets the ends first.
        for node in range(len(parents) - 1, -1, -1):
            has_call = first[node] != NONE
            if has_call and not is_passed[node]:
                ends.append(node)
            if (has_call or is_passed[node]) and parents[node] != NONE:
                is_passed[parents[node]] = 1
        return ends

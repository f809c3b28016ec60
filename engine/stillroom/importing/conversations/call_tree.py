"""A prefix tree (trie) of messages that joins calls which repeat their history.

A call is a path from the root. If its messages begin with all messages of an earlier call,
including the reply, it ends further down on the same path. So calls that end at a leaf are
conversations, and calls that end on the path to a leaf are parts of them. Messages of two calls in
a group are equal if role, text and tool calls are; a tool's result is matched to its call by the
call's position, not by its id.
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
"""The numbers of new messages after a known prefix to try, most frequent first."""
ORPHAN = "a tool's message answers no tool call"


class CallTree:
    """The prefix tree of all calls; a node is a message together with all messages before it."""

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
        """Adds a call, given by the numbers of its messages; returns its last node.

        Raises UnreadableRowError if a tool message answers no call of the conversation.
        """
        request = tuple(messages[:-1])
        known, node = self._longest_known_prefix(group, request)
        try:
            node = self._extend(group, node, messages[known:])
        except UnreadableRowError:
            if known == 0:
                raise
            # The result of a call that is before the last messages.
            node = self._extend(group, NONE, messages)
        self._by_request[hash((group, request))] = self._parents[node]
        self._end_row(node, row, messages[-1])
        return node

    def _longest_known_prefix(self, group: str | None, request: tuple[int, ...]) -> tuple[int, int]:
        """Returns the length of the longest known prefix of a request, and the prefix's last node.

        Most calls repeat the previous request and add its reply, and then results or a question.
        """
        for num_new in _USUALLY_NEW:
            if num_new < len(request):
                node = self._by_request.get(hash((group, request[:-num_new])))
                if node is not None:
                    return len(request) - num_new, node
        return 0, NONE

    def _extend(self, group: str | None, node: int, messages: Sequence[int]) -> int:
        """Adds messages below a node (NONE: the root); returns the last node."""
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
                result = self._answered_call(message, numbers)
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

    def _answered_call(self, message: int, numbers: dict[int, int]) -> int:
        """Returns the position of the tool call that a message answers; NONE if it has no call id.

        Raises UnreadableRowError if no call of the conversation has its id.
        """
        answered = self._store.answered[message]
        if answered == 0:
            return NONE
        number = numbers.get(answered)
        if number is None:
            raise UnreadableRowError(ORPHAN, "the call was cut from the history, or has another id")
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
        """Yields the rows of the calls that end at a node, in order."""
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
        """Returns the parent of a node; NONE for the first message."""
        return self._parents[node]

    def message(self, node: int) -> int:
        """Returns the number of the message at a node, in its first logged form.

        For a logged reply this is the longest form of the reply itself, which has what later
        histories leave out, such as reasoning.
        """
        reply = self._replies[node]
        return self._messages[node] if reply == NONE else reply

    def result_of(self, node: int) -> int:
        """Returns the position of the tool call that the message at a node answers."""
        return self._results[node]

    def has_user(self, node: int) -> bool:
        """Returns whether there is a user message on the path to a node."""
        return bool(self._has_user[node])

    def ends(self) -> list[int]:
        """Returns the nodes where a call ends and no longer call continues."""
        first, parents = self._first_rows, self._parents
        is_passed = bytearray(len(parents))
        ends: list[int] = []
        # A node is added after its parent, so in reverse order the ends come first.
        for node in range(len(parents) - 1, -1, -1):
            has_call = first[node] != NONE
            if has_call and not is_passed[node]:
                ends.append(node)
            if (has_call or is_passed[node]) and parents[node] != NONE:
                is_passed[parents[node]] = 1
        return ends

"""A prefix tree (trie) of messages, which joins calls that repeat their history.

Each call is a path from the root: its messages, and then its reply. A later call that repeats all
of them ends further down on the same path. So a call that no other call extends is a conversation,
and the calls that end on its path are its earlier turns. Messages of two calls in a group are equal
if their role, text and tool calls are; a tool's result is matched to its call by the call's
position, not by its id.
"""

from array import array
from collections.abc import Iterator, Sequence

from stillroom.importing.conversations.message_store import ASSISTANT, TOOL, USER, MessageStore
from stillroom.importing.json_rows import UnreadableRowError

NONE = -1
ORPHAN = "a tool message without its tool call"


class CallTree:
    """The prefix tree of all calls; a node is a message together with all messages before it."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._by_path: dict[int, int] = {}
        """The node at the end of each path, by the path's hash."""
        # The following arrays have one element per node.
        self._parents, self._messages = array("i"), array("I")
        self._answered_calls, self._has_user = array("i"), array("B")
        """The position of the answered tool call; whether a user message is on the path."""
        self._first_rows, self._longest_replies = array("i"), array("i")
        """The first row that ends at the node, and its reply's longest form, or NONE."""
        self._next_rows = array("i")
        """For each row, the next row that ends at the same node: a linked list."""
        columns = (self._parents, self._messages, self._answered_calls, self._has_user,
                   self._first_rows, self._longest_replies)  # fmt: skip
        self._appends = tuple([column.append for column in columns])

    @property
    def num_nodes(self) -> int:
        """The number of nodes, without the root."""
        return len(self._parents)

    def add(self, group: str | None, messages: Sequence[int], row: int) -> int:
        """Adds the call of a row, given by the numbers of its messages; returns its last node.

        Raises UnreadableRowError if a tool message answers no call of the conversation.
        """
        node = self._add_path(group, messages)
        self._record_end(node, row, messages[-1])
        return node

    def _add_path(self, group: str | None, messages: Sequence[int]) -> int:
        """Adds the missing nodes of a path from the root, and returns its last node."""
        store, by_path = self._store, self._by_path
        roles, digests = store.roles, store.digests
        node, path_hash, num_calls = NONE, hash(("group", group)), 0
        positions: dict[int, int] = {}
        for message in messages:
            role, answered = roles[message], NONE
            if role == ASSISTANT:
                for call in store.calls(message):
                    positions[call] = num_calls
                    num_calls += 1
            elif role == TOOL:
                answered = self._answered_call(message, positions)
            path_hash = hash((path_hash, digests[message], answered))
            child = by_path.get(path_hash)
            if child is None:
                child = by_path[path_hash] = len(self._parents)
                has_user = role == USER or (node != NONE and self._has_user[node])
                values = (node, message, answered, has_user, NONE, NONE)
                for append, value in zip(self._appends, values, strict=True):
                    append(value)
            node = child
        return node

    def _answered_call(self, message: int, positions: dict[int, int]) -> int:
        """Returns the position of the tool call that a message answers; NONE if it has no call id.

        `positions` has the position of each call by its id's digest. Raises UnreadableRowError if
        it lacks the message's id.
        """
        call_id = self._store.answered[message]
        if call_id == 0:
            return NONE
        position = positions.get(call_id)
        if position is None:
            raise UnreadableRowError(ORPHAN, "the call was cut from the history, or has another id")
        return position

    def _record_end(self, node: int, row: int, reply: int) -> None:
        """Records that a row's call ends at a node, with this message as its reply."""
        while len(self._next_rows) <= row:
            self._next_rows.append(NONE)
        longest = self._longest_replies[node]
        if longest == NONE or self._store.sizes[reply] > self._store.sizes[longest]:
            self._longest_replies[node] = reply
        first = self._first_rows[node]
        if first == NONE:
            self._first_rows[node] = row
            return
        self._next_rows[row] = self._next_rows[first]
        self._next_rows[first] = row

    def rows_at(self, node: int) -> Iterator[int]:
        """Yields the rows whose calls end at a node, starting with the first row."""
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
        """Returns the number of the message at a node.

        If the node is a logged reply, returns its longest logged form, since histories leave out
        parts such as reasoning. Any other message is returned in its first logged form.
        """
        reply = self._longest_replies[node]
        return self._messages[node] if reply == NONE else reply

    def answered_call(self, node: int) -> int:
        """Returns the position of the tool call that a node's message answers; NONE for others."""
        return self._answered_calls[node]

    def has_user(self, node: int) -> bool:
        """Returns whether there is a user message on the path to a node."""
        return bool(self._has_user[node])

    def final_nodes(self) -> list[int]:
        """Returns the last node of each call that no other call extends."""
        first, parents = self._first_rows, self._parents
        is_extended = bytearray(len(parents))
        final: list[int] = []
        # A node is added after its parent, so in reverse order the longest calls come first.
        for node in range(len(parents) - 1, -1, -1):
            has_call = first[node] != NONE
            if has_call and not is_extended[node]:
                final.append(node)
            if (has_call or is_extended[node]) and parents[node] != NONE:
                is_extended[parents[node]] = 1
        return final

"""Groups rows into rollouts, and builds each rollout from its messages and rows."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stillroom.importing.conversations.call_tree import NONE, CallTree
from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.message_store import ASSISTANT
from stillroom.importing.conversations.row_table import RowTable, StoredRow
from stillroom.importing.payloads.messages import as_context
from stillroom.importing.redaction import Redaction

_ASSISTANT, _USER = b'{"role":"assistant"', b'{"role":"user"'
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Which rollout each row belongs to. A rollout is named by its kept row: its last call."""

    owners: Sequence[int]
    """For each row, the kept row of the rollout that it belongs to."""
    kept: Sequence[int]
    """The kept rows, in the order of the sources."""
    branch_of: dict[int, int]
    """The rollout that a rollout branches from, both given by their kept rows."""


def join_rows(rows: RowTable, tree: CallTree) -> JoinedRows:
    """Groups the rows into rollouts.

    Where conversations diverge, the longest one (or the first of several) owns the shared calls,
    and the others branch from it.
    """
    owners = array("i", [NONE]) * len(rows)
    for row in range(len(rows)):
        if rows.nodes[row] == NONE:  # a whole conversation, which is never joined
            owners[row] = row
    branch_of = _join_calls(rows, tree, owners)
    if rows.has_parents:
        _link_to_parents(rows, owners, branch_of)
    kept = [row for row, owner in enumerate(owners) if owner == row]
    return JoinedRows(owners, kept, branch_of)


def _join_calls(rows: RowTable, tree: CallTree, owners: "array[int]") -> dict[int, int]:
    """Writes the owner of each call's row to `owners`; returns the branches, as in JoinedRows."""
    node_owners = array("i", [NONE]) * tree.num_nodes
    branch_of: dict[int, int] = {}
    main_of_group: dict[int, int] = {}
    longest_first = [(next(tree.rows_at(node)), node) for node in tree.final_nodes()]
    longest_first.sort(key=lambda pair: (-rows.lengths[pair[0]], pair[0]))
    for kept, final_node in longest_first:
        node = final_node
        while node != NONE and node_owners[node] == NONE:
            node_owners[node] = kept
            for row in tree.rows_at(node):
                owners[row] = kept
            node = tree.parent(node)
        group = rows.group(kept)
        if node != NONE and (group or tree.has_user(node)):
            branch_of[kept] = node_owners[node]
        elif group in main_of_group:
            branch_of[kept] = main_of_group[group]
        if group:
            main_of_group.setdefault(group, kept)
    return branch_of


def _link_to_parents(rows: RowTable, owners: Sequence[int], branch_of: dict[int, int]) -> None:
    """Adds to `branch_of` the rollouts whose source names a parent row."""
    by_id = rows.by_id()
    for row, kept in enumerate(owners):
        parent = by_id.get(rows.parent(row)) if rows.parent(row) else None
        if parent is None or kept in branch_of or owners[parent] == kept:
            continue
        ancestor: int | None = owners[parent]
        while ancestor is not None and ancestor != kept:
            ancestor = branch_of.get(ancestor)
        if ancestor is None:  # otherwise it would be a branch of its own branch
            branch_of[kept] = owners[parent]


@dataclass(frozen=True, slots=True)
class ImportedRollout:
    """One rollout: its messages as JSON, and the rows it was built from."""

    row: int
    """Its kept row."""
    messages: list[bytes]
    """The messages as JSON objects in Stillroom's format."""
    rows: list[StoredRow]
    """Its rows in the order of the conversation; the kept row is the last."""
    calls: list[StoredRow]
    """Its distinct calls: rows that log the same call are merged."""
    metadata: bytes
    """The kept row's metadata as a JSON object."""
    dropped: list[str] = field(default_factory=list[str])
    num_turns: int = 0
    """The number of assistant turns that are replies of its calls."""
    branch_of: int | None = None
    num_unlogged_turns: int = 0
    """The number of assistant turns that are not the reply of any logged call."""

    @property
    def kept(self) -> StoredRow:
        """The kept row."""
        return self.rows[-1]

    @property
    def messages_json(self) -> bytes:
        """The messages as a JSON array."""
        return b"[" + b",".join(self.messages) + b"]"

    @property
    def num_prompt_messages(self) -> int:
        """The number of messages up to the last user message that is answered.

        Without user messages, it is the number of messages before the first assistant message.
        """
        is_answered = False
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].startswith(_ASSISTANT):
                is_answered = True
            elif is_answered and self.messages[index].startswith(_USER):
                return index + 1
        answers = (i for i, message in enumerate(self.messages) if message.startswith(_ASSISTANT))
        return next(answers, len(self.messages))


class RolloutBuilder:
    """Builds the rollouts of an import on demand."""

    def __init__(
        self, collected: RowCollector, joined: JoinedRows, redaction: Redaction | None
    ) -> None:
        """`redaction` removes secrets and personal data; None leaves the rollouts as logged."""
        self._collected, self._joined, self._redaction = collected, joined, redaction

    def build(self, row: int) -> ImportedRollout:
        """Returns the rollout of the kept row `row`."""
        if self._collected.rows.nodes[row] != NONE:
            return self._build_from_calls(row)
        stored = self._collected.rows.stored_row(row)
        messages = self._clean_messages(stored.messages)
        (stored,) = self._clean_rows([stored])
        replies = [message for message in messages if message.startswith(_ASSISTANT)]
        return ImportedRollout(
            row,
            messages,
            [stored],
            [stored],
            self._redacted_metadata(stored),
            list(stored.dropped),
            num_turns=sum(b'"weight":0' not in reply for reply in replies),
            branch_of=self._joined.branch_of.get(row),
        )

    def _build_from_calls(self, row: int) -> ImportedRollout:
        """Returns the rollout of the call at `row` and of the earlier calls that it continues."""
        store, tree, rows = self._collected.store, self._collected.tree, self._collected.rows
        path = tree.path_to(rows.nodes[row])
        numbers = list(map(tree.message, path))
        messages = self._clean_messages(list(map(store.encoded, numbers)))
        copies_of_calls = list[list[int]]()
        num_unlogged_turns = 0
        for index, node in enumerate(path):
            first = tree.first_row(node)
            if first != NONE and self._joined.owners[first] == row:
                # Sorted by whether it is the kept row, so that the kept row is the last.
                copies_of_calls.append(sorted(tree.rows_at(node), key=row.__eq__))
            elif store.roles[numbers[index]] == ASSISTANT:
                messages[index] = msgspec.json.encode(as_context(_DECODER.decode(messages[index])))
                num_unlogged_turns += first == NONE
        answered_calls = list(map(tree.answered_call, path))
        if not self._ids_match(numbers, answered_calls):
            messages = list(_restore_call_ids(messages, answered_calls))
        calls = [self._clean_rows(rows.stored_rows(copies)) for copies in copies_of_calls]
        rollout_rows = [stored for copies in calls for stored in copies]
        dropped = [reason for number in numbers for reason in store.dropped.get(number, ())]
        dropped += [reason for stored in rollout_rows for reason in stored.dropped]
        return ImportedRollout(
            row,
            messages,
            rollout_rows,
            list(map(_merge_copies, calls)),
            self._redacted_metadata(rollout_rows[-1]),
            list(dict.fromkeys(dropped)),
            num_turns=len(calls),
            branch_of=self._joined.branch_of.get(row),
            num_unlogged_turns=num_unlogged_turns,
        )

    def _clean_messages(self, messages: list[bytes]) -> list[bytes]:
        """Returns the messages of a conversation without secrets and personal data."""
        if self._redaction is None:
            return messages
        decoded = list(map(_DECODER.decode, messages))
        self._redaction.begin_conversation()
        return [msgspec.json.encode(self._redaction.redact_message(message)) for message in decoded]

    def _clean_rows(self, rows: list[StoredRow]) -> list[StoredRow]:
        """Returns the rows of a rollout without secrets and personal data."""
        if self._redaction is None:
            return rows
        text, name = self._redaction.redact_text, self._redaction.redact_name
        rows = [
            msgspec.structs.replace(
                row,
                provider=row.provider and name(row.provider),
                model=row.model and name(row.model),
                answered_by=tuple(map(name, row.answered_by)),
                scores={name(key): value for key, value in row.scores.items()},
            )
            for row in rows
        ]
        # Of these fields, only the kept row's are written.
        kept = rows[-1]
        rows[-1] = msgspec.structs.replace(
            kept,
            id=kept.id and text(kept.id),
            group=kept.group and text(kept.group),
            error=kept.error and text(kept.error),
        )
        return rows

    def _redacted_metadata(self, row: StoredRow) -> bytes:
        if self._redaction is None or row.metadata == b"{}":
            return row.metadata
        return msgspec.json.encode(self._redaction.redact_metadata(_DECODER.decode(row.metadata)))

    def _ids_match(self, numbers: Sequence[int], answered_calls: Sequence[int]) -> bool:
        """Returns whether each tool message has the id of the call that it answers.

        Both lists have an element per message: its number, and the position of the answered call.
        """
        store = self._collected.store
        calls: list[int] = []
        for number, position in zip(numbers, answered_calls, strict=True):
            calls += store.calls(number)
            if position != NONE and calls[position] != store.answered[number]:
                return False
        return True


def _merge_copies(copies: Sequence[StoredRow]) -> StoredRow:
    """Merges the rows that log the same call; later rows and lower scores take precedence."""
    *others, last = copies
    if not others:
        return last
    fields = ("provider", "model", "usage", "cost_usd", "started_at", "duration_s")
    first_values = {
        name: next(
            (value for row in (last, *others) if (value := getattr(row, name)) is not None), None
        )
        for name in fields
    }
    scores: dict[str, float] = {}
    for row in copies:
        for name, value in row.scores.items():
            scores[name] = min(scores.get(name, value), value)
    return msgspec.structs.replace(last, scores=scores, **first_values)


def _restore_call_ids(messages: Sequence[bytes], answered_calls: Sequence[int]) -> Iterator[bytes]:
    """Yields the messages, with each tool message's id set to that of the call it answers.

    Some systems send a call back with another id, and a conversation's messages come from several
    logged calls.
    """
    ids: list[str] = []
    for encoded, position in zip(messages, answered_calls, strict=True):
        message = _DECODER.decode(encoded)
        ids += [call["id"] for call in message.get("tool_calls", ())]
        if position != NONE:
            yield msgspec.json.encode({**message, "tool_call_id": ids[position]})
        else:
            yield encoded

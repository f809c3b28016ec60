"""Puts a rollout together from its calls: its messages, and what is known of each of its turns."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stillroom.importing.joining.call_tree import NONE
from stillroom.importing.joining.intake import Intake
from stillroom.importing.joining.join import JoinedRows
from stillroom.importing.joining.message_process import MessageProcess, clean_piece
from stillroom.importing.joining.row_table import LoggedFacts
from stillroom.importing.joining.seen_batch import ASSISTANT, TOOL
from stillroom.importing.redaction import Redaction

_ASSISTANT, _USER = b'{"role":"assistant"', b'{"role":"user"'
_REMEMBERED = 256
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class ImportedRollout:
    """One rollout: its messages as JSON, and the rows that it is made of."""

    row: int
    """Its kept row."""
    pieces: list[bytes]
    """The messages as JSON objects in our shape."""
    facts: list[LoggedFacts]
    """What is known of its rows, in the order of the conversation; the kept row's is the last."""
    metadata: bytes
    """The kept row's metadata as a JSON object."""
    losses: list[str] = field(default_factory=list[str])
    num_turns: int = 0
    """The number of assistant turns that were sampled for it."""
    branch_of: int | None = None
    num_unanswered: int = 0
    """The number of assistant turns that no call of the sources answered."""

    @property
    def kept(self) -> LoggedFacts:
        """What is known of the kept row."""
        return self.facts[-1]

    @property
    def messages(self) -> bytes:
        """The messages as a JSON array."""
        return b"[" + b",".join(self.pieces) + b"]"

    @property
    def num_prompt(self) -> int:
        """The number of messages up to the last one of a user that has an answer.

        Without a user, that is the number before the first answer.
        """
        is_answered = False
        for index in range(len(self.pieces) - 1, -1, -1):
            if self.pieces[index].startswith(_ASSISTANT):
                is_answered = True
            elif is_answered and self.pieces[index].startswith(_USER):
                return index + 1
        answers = (i for i, piece in enumerate(self.pieces) if piece.startswith(_ASSISTANT))
        return next(answers, len(self.pieces))


class Composer:
    """Composes the rollouts of an import, each when it is wanted."""

    def __init__(
        self,
        intake: Intake,
        joined: JoinedRows,
        redaction: Redaction | None,
        process: MessageProcess | None = None,
    ) -> None:
        """`redaction` takes secrets out; without it rollouts are as their sources have them.

        `process` has cleaned messages with this redaction.
        """
        self._process = process
        self._intake, self._joined, self._redaction = intake, joined, redaction
        self._clean: OrderedDict[int, bytes] = OrderedDict()

    def compose(self, row: int) -> ImportedRollout:
        """Returns the rollout of a kept row."""
        if self._redaction is not None:
            self._redaction.begin_conversation()
        rows = self._intake.rows
        branch_of = self._joined.branch_of.get(row)
        if rows.nodes[row] != NONE:
            return self._of_calls(row, branch_of)
        facts = rows.facts(row)
        pieces = [self._cleaned(_ANY.decode(piece)) for piece in facts.pieces]
        turns = [piece for piece in pieces if piece.startswith(_ASSISTANT)]
        num_trained = sum(b'"weight":0' not in piece for piece in turns)
        return ImportedRollout(
            row,
            pieces,
            [facts],
            self._metadata(facts),
            list(facts.losses),
            num_trained,
            branch_of,
        )

    def _of_calls(self, row: int, branch_of: int | None) -> ImportedRollout:
        store, tree, rows = self._intake.store, self._intake.tree, self._intake.rows
        path = tree.path_to(rows.nodes[row])
        messages = list(map(tree.message, path))
        roles = [store.roles[message] for message in messages]
        own, untrained = list[int](), list[int]()
        num_turns = num_unanswered = 0
        for index, node in enumerate(path):
            first = tree.first_row(node)
            if first != NONE and self._joined.owners[first] == row:
                own += sorted(tree.rows_at(node), key=row.__eq__)
                num_turns += 1
            elif roles[index] == ASSISTANT:
                untrained.append(index)
                num_unanswered += first == NONE
        pieces = self._pieces(messages)
        for index in untrained:
            pieces[index] = pieces[index][:-1] + b',"weight":0}'
        results = list(map(tree.result_of, path))
        if not self._agree(messages, roles, results):
            pieces = list(_with_ids(pieces, results))
        facts = rows.all_facts(own)
        lost = [loss for message in messages for loss in store.losses.get(message, ())]
        lost += [loss for each in facts for loss in each.losses]
        losses = list(dict.fromkeys(lost))
        metadata = self._metadata(facts[-1])
        return ImportedRollout(
            row, pieces, facts, metadata, losses, num_turns, branch_of, num_unanswered
        )

    def _pieces(self, numbers: Sequence[int]) -> list[bytes]:
        """Returns messages as JSON in our shape."""
        cleaned = [None] * len(numbers) if self._process is None else self._process.pieces(numbers)
        return [
            self._piece(number) if piece is None else piece
            for number, piece in zip(numbers, cleaned, strict=True)
        ]

    def _piece(self, number: int) -> bytes:
        """Returns a message as JSON in our shape; one that was just wanted is remembered."""
        piece = self._clean.get(number)
        if piece is not None:
            self._clean.move_to_end(number)
            return piece
        piece = clean_piece(self._intake.store.raw(number), self._redaction)
        # What has marks may have other numbers in another conversation.
        if self._redaction is None or not self._redaction.has_marked:
            self._clean[number] = piece
            if len(self._clean) > _REMEMBERED:
                self._clean.popitem(last=False)
        return piece

    def _cleaned(self, message: dict[str, Any]) -> bytes:
        clean = message if self._redaction is None else self._redaction.message(message)
        return msgspec.json.encode(clean)

    def _metadata(self, facts: LoggedFacts) -> bytes:
        if self._redaction is None or facts.metadata == b"{}":
            return facts.metadata
        return msgspec.json.encode(self._redaction.value(_ANY.decode(facts.metadata)))

    def _agree(self, messages: Sequence[int], roles: Sequence[int], results: Sequence[int]) -> bool:
        """Returns whether each tool's message has the id of the call that it answers."""
        store = self._intake.store
        calls: list[int] = []
        for message, role, result in zip(messages, roles, results, strict=True):
            if role == ASSISTANT:
                calls += store.calls(message)
            elif role == TOOL and result != NONE and calls[result] != store.answered[message]:
                return False
        return True


def _with_ids(pieces: Sequence[bytes], results: Sequence[int]) -> Iterator[bytes]:
    """Yields the messages, in which tools' messages have the ids of the calls that they answer.

    Systems give a call other ids when they send it back, and messages come from several calls.
    """
    ids: list[str] = []
    for piece, result in zip(pieces, results, strict=True):
        message = _ANY.decode(piece)
        ids += [call["id"] for call in message.get("tool_calls", ())]
        if result != NONE:
            yield msgspec.json.encode({**message, "tool_call_id": ids[result]})
        else:
            yield piece

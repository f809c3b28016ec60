"""Keeps each distinct message of the sources once: in a file, with a few numbers in memory.

Logs repeat their history with every call. So a message is recognised by a hash of its bytes as the
source wrote them, and is decoded only when it is seen first, and again when it is written.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from stillroom.importing.joining.messages import shaped_message
from stillroom.importing.joining.recent import REMEMBERED, RecentNumbers
from stillroom.importing.joining.seen_batch import SeenBatch, seen_batch
from stillroom.importing.joining.spill import Spill
from stillroom.importing.json_rows import UnreadableRowError


class MessageStore:
    """The distinct messages by number, each in one of the forms in which sources wrote it."""

    def __init__(
        self,
        spill: Spill,
        *,
        look_at: Callable[[dict[str, Any]], None] | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        """`look_at` is shown each distinct message that calls tools, in our shape.

        A message that was not seen for `remembered` others counts as a new one.
        """
        self._spill, self._look_at = spill, look_at
        self._by_hash = RecentNumbers(remembered)
        self.places, self.sizes = array("Q"), array("I")
        """Where in the spill each message is as its source wrote it, and its length."""
        self._unseen: list[bytes] = []
        self._not_looked_at: dict[int, bytes] = {}
        self.digests, self.roles, self.answered = array("q"), array("B"), array("q")
        """For each message the digest of what a later history repeats of it, the role, and the
        digest of the id of the call that a tool's message answers (0 for none)."""
        self._calls = array("q")
        self._more_calls: dict[int, tuple[int, ...]] = {}
        self.losses: dict[int, tuple[str, ...]] = {}
        """What some messages had in their source and lack in our shape."""
        self._problems: dict[int, tuple[str, str]] = {}

    def numbers_of(self, raws: Sequence[bytes]) -> list[int]:
        """Returns the numbers of messages, given as the JSON that their source wrote.

        Of new ones nothing is known before `see` or `learn`.
        """
        # One that was forgotten is kept once more, which changes nothing but the space.
        first = len(self.places)
        numbers, new = self._by_hash.numbers_of(list(map(hash, raws)), first)
        if new:
            self._add([raws[index] for index in new], first)
        return numbers

    def _add(self, raws: list[bytes], first: int) -> None:
        place = self._spill.append(b"".join(raws))
        for raw in raws:
            self.places.append(place)
            self.sizes.append(len(raw))
            place += len(raw)
        self._unseen += raws
        if self._look_at is not None:
            self._not_looked_at.update(enumerate(raws, first))

    def take_unseen(self) -> tuple[int, list[bytes]]:
        """Returns the new messages of which nothing is known yet, and the first one's number."""
        unseen, self._unseen = self._unseen, []
        return len(self.places) - len(unseen), unseen

    def see(self) -> None:
        """Decodes the new messages of which nothing is known yet."""
        if self._unseen:
            first, raws = self.take_unseen()
            self.learn(first, seen_batch(raws))

    def learn(self, first: int, batch: SeenBatch) -> None:
        """Takes in what is known of messages, of which the first has this number."""
        end = first + len(batch.roles)
        if (missing := end - len(self.roles)) > 0:
            self.roles.frombytes(bytes(missing))
            for numbers in (self.digests, self.answered, self._calls):
                numbers.frombytes(bytes(missing * numbers.itemsize))
        self.roles[first:end] = array("B", batch.roles)
        self.digests[first:end] = array("q", batch.digests)
        self.answered[first:end] = array("q", batch.answered)
        self._calls[first:end] = array("q", batch.calls)
        self._more_calls |= {first + place: calls for place, calls in batch.more_calls.items()}
        self.losses |= {first + place: losses for place, losses in batch.losses.items()}
        self._problems |= {first + place: problem for place, problem in batch.problems.items()}

    def check(self, numbers: Sequence[int]) -> None:
        """Raises UnreadableRowError if no chat can hold one of these messages."""
        if not self._problems and self._look_at is None:
            return
        for number in numbers:
            if (problem := self._problems.get(number)) is not None:
                raise UnreadableRowError(*problem)
            raw = self._not_looked_at.pop(number, None)
            if raw is not None and self._look_at is not None and self._calls[number]:
                self._look_at(shaped_message(raw))

    def calls(self, number: int) -> tuple[int, ...]:
        """Returns the digests of the ids of a message's tool calls."""
        first = self._calls[number]
        return self._more_calls.get(number, (first,)) if first else ()

    def raw(self, number: int) -> bytes:
        """Returns a message as its source wrote it."""
        return self._spill.read(self.places[number], self.sizes[number])

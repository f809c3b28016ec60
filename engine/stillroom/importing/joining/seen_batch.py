"""What joining has to know of several messages, as a process finds it out and sends it."""

from array import array
from collections.abc import Iterable

import msgspec

from stillroom.importing.joining.messages import SeenMessage, plain_message, seen_message
from stillroom.importing.json_rows import UnreadableRowError

SYSTEM, USER, ASSISTANT, TOOL, UNREADABLE = range(5)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


class SeenBatch(msgspec.Struct, array_like=True, gc=False):
    """What is known of messages that follow one another, by their places in the batch."""

    roles: bytes
    """A byte for each message; UNREADABLE for one that no chat can hold."""
    digests: bytes
    """SeenMessage.digest of each."""
    answered: bytes
    """SeenMessage.answered of each, in eight bytes."""
    calls: bytes
    """The first of SeenMessage.calls of each in eight bytes, 0 for none."""
    more_calls: dict[int, tuple[int, ...]]
    """All calls of the messages that have several."""
    losses: dict[int, tuple[str, ...]]
    problems: dict[int, tuple[str, str]]
    """The reason and the detail of an unreadable one."""


class BatchMaker:
    """Collects what is known of messages."""

    def __init__(self) -> None:
        self._roles, self._digests = bytearray(), bytearray()
        self._answered, self._calls = array("q"), array("q")
        self._batch = SeenBatch(b"", b"", b"", b"", {}, {}, {})

    def add(self, seen: SeenMessage) -> None:
        """Adds the next message."""
        calls, number = seen.calls, len(self._roles)
        self._roles.append(_ROLES[seen.role])
        self._digests += seen.digest
        self._answered.append(seen.answered)
        self._calls.append(calls[0] if calls else 0)
        if len(calls) > 1:
            self._batch.more_calls[number] = calls
        if seen.losses:
            self._batch.losses[number] = seen.losses

    def add_unreadable(self, error: UnreadableRowError) -> None:
        """Adds a message that cannot be read."""
        self._batch.problems[len(self._roles)] = (error.reason, error.detail)
        self._roles.append(UNREADABLE)
        self._digests += bytes(8)
        self._answered.append(0)
        self._calls.append(0)

    def batch(self) -> SeenBatch:
        """Returns what was added."""
        return msgspec.structs.replace(
            self._batch,
            roles=bytes(self._roles),
            digests=bytes(self._digests),
            answered=self._answered.tobytes(),
            calls=self._calls.tobytes(),
        )


def seen_batch(raws: Iterable[bytes]) -> SeenBatch:
    """Returns what joining has to know of messages, given as their sources wrote them."""
    maker = BatchMaker()
    for raw in raws:
        try:
            maker.add(seen_message(raw, plain_message(raw)))
        except UnreadableRowError as error:
            maker.add_unreadable(error)
    return maker.batch()

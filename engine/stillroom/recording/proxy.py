"""The recording proxy: it passes requests on to their upstreams and journals the model calls."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stillroom.recording.admission import Admission
from stillroom.recording.answering import Caller
from stillroom.recording.capture import CallCapture
from stillroom.recording.heads import RequestHead
from stillroom.recording.journal import CallJournal, Outcome
from stillroom.recording.pass_through import PassThrough
from stillroom.recording.records import kind_of
from stillroom.recording.refusals import Refused
from stillroom.recording.upstream_side import ConnectionPool
from stillroom.recording.upstreams import Upstream, route

MOST_KEPT = 16 << 20
"""The most bytes of a request, and of a reply, that are recorded unless the user says otherwise."""


class RecordingProxy:
    """Answers each request with what its upstream answers.

    `secrets` are taken out of all records, as the keys of each request are out of its own.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        journal: CallJournal,
        upstreams: Sequence[Upstream],
        admission: Admission,
        *,
        secrets: Sequence[str] = (),
        most_kept: int = MOST_KEPT,
    ) -> None:
        self.loop, self.journal = loop, journal
        self.pool = ConnectionPool(loop)
        self._clients: set[Caller] = set()
        self._exchanges: set[PassThrough] = set()
        self.is_stopping = False
        self._secrets = tuple(secrets)
        self._upstreams, self._admission, self._most_kept = upstreams, admission, most_kept
        self._is_failing = False
        self._complaints = Counter[str]()

    def answer(self, client: Caller, head: RequestHead) -> PassThrough | Refused:
        """Returns what passes a request on, or why it is refused."""
        target = self._admission.admitted(head, client.own_address)
        if isinstance(target, Refused):
            return target
        found = route(target, self._upstreams)
        if found is None:
            names = ", ".join(f"/{upstream.name}" for upstream in self._upstreams)
            return Refused(
                404, "no_upstream", "the path names none of the upstreams",
                f"begin it with one of {names}, as in the base_url that was printed",
            )  # fmt: skip
        upstream, path = found
        kind = kind_of(head.method, path)
        if kind is not None and self._is_failing:
            if not self.journal.can_write():
                return Refused(
                    503, "journal", f"calls cannot be recorded in {self.journal.folder}",
                    "make room on the disk, or give another folder with --output; the next call "
                    "is recorded again as soon as it can be",
                )  # fmt: skip
            self._is_failing = False
        head = replace(head, target=path)
        capture = None
        if kind is not None:
            limit, secrets = self._most_kept, self._secrets
            capture = CallCapture(kind, upstream, head, limit=limit, secrets=secrets)
        exchange = PassThrough(self, client, head, upstream, capture)
        self._exchanges.add(exchange)
        return exchange

    def joined(self, client: Caller) -> None:
        """Takes note of a client's connection."""
        self._clients.add(client)

    def left(self, client: Caller) -> None:
        """Takes note of a connection that has ended."""
        self._clients.discard(client)

    def ended(self, exchange: PassThrough) -> None:
        """Takes note of an exchange that has ended."""
        self._exchanges.discard(exchange)

    def note(self, outcome: Outcome) -> None:
        """Takes note of whether a call could be recorded."""
        if outcome is not None:
            self._is_failing = True
            self.complain(f"a call was not recorded, and its reply was broken off: {outcome}")

    def complain(self, problem: str) -> None:
        """Writes a line to standard error; of the same problem only the 1st, 2nd, 4th, 8th, …"""
        self._complaints[problem] += 1
        times = self._complaints[problem]
        if times & (times - 1) == 0:
            again = f" ({times} times)" if times > 1 else ""
            sys.stderr.write(f"stillroom record: {problem}{again}\n")
            sys.stderr.flush()

    @property
    def num_open(self) -> int:
        """The number of requests that are being answered."""
        return len(self._exchanges)

    def stop(self) -> None:
        """Breaks off what is still being answered, and records it as that."""
        for exchange in [*self._exchanges]:
            exchange.stop()
        for client in [*self._clients]:
            client.transport.close()
        self.pool.close()

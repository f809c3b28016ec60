"""Answers requests with what was recorded for them, without a network."""

import asyncio
import re

from stillroom.errors import EngineError
from stillroom.recording.admission import Admission
from stillroom.recording.answering import Caller
from stillroom.recording.heads import RequestHead, keys_in, reply_bytes
from stillroom.recording.records import CallKind, kind_of
from stillroom.recording.refusals import Refused
from stillroom.recording.replay.requests import request_key
from stillroom.recording.replay.tape import Replayed, Tape
from stillroom.recording.scrubbing import redactor_of

_EVENT = re.compile(rb".*?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_MOST_BYTES = 64 << 20


class ReplayFront:
    """Answers the requests of all clients from a tape."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tape: Tape, admission: Admission) -> None:
        self.loop = loop
        self.is_stopping = False
        self._tape, self._admission = tape, admission
        self._clients: set[Caller] = set()
        self._answers: set[ReplayedAnswer] = set()

    @property
    def num_open(self) -> int:
        """The number of requests that are being answered."""
        return len(self._answers)

    def joined(self, client: Caller) -> None:
        """Takes note of a client's connection."""
        self._clients.add(client)

    def left(self, client: Caller) -> None:
        """Takes note of a connection that has ended."""
        self._clients.discard(client)

    def answer(self, client: Caller, head: RequestHead) -> "ReplayedAnswer | Refused":
        """Returns what answers a request, or why it is refused."""
        target = self._admission.admitted(head, client.own_address)
        if isinstance(target, Refused):
            return target
        kind = kind_of(head.method, target)
        if kind is None:
            return Refused(
                404, "not_recorded", f"{head.method} {target.partition('?')[0]} is none of the "
                "calls that are recorded",
                "replay answers POSTs to …/chat/completions, …/responses and …/messages",
            )  # fmt: skip
        answer = ReplayedAnswer(self, client, head, kind, target)
        self._answers.add(answer)
        return answer

    def find(
        self, head: RequestHead, kind: CallKind, target: str, data: bytes
    ) -> Replayed | Refused:
        """Returns the recorded reply to a request, or the error that names the nearest one."""
        # Keys were taken out of what was recorded.
        data = redactor_of(tuple(dict.fromkeys(keys_in(head)))).data(data)
        try:
            key = request_key(kind, target, data)
            found = self._tape.answer(key)
            if found is not None:
                return found
            nearest = self._tape.nearest(key, data)
        except (EngineError, OSError, ValueError) as error:
            return Refused(500, "tape", f"the recorded calls cannot be read: {error}",
                           "start the replay again with their journals")  # fmt: skip
        what = f"; the nearest is {nearest}" if nearest else f", and no other call of {kind}"
        return Refused(
            404, "not_recorded", f"no recorded call has this request{what}",
            "make the request as it was recorded, or record it: stillroom record --upstream …",
        )  # fmt: skip

    def ended(self, answer: "ReplayedAnswer") -> None:
        """Takes note of an answer that has ended."""
        self._answers.discard(answer)

    def stop(self) -> None:
        """Breaks off what is still being answered, and closes all connections."""
        for client in [*self._clients]:
            client.transport.close()
        self._tape.close()


class ReplayedAnswer:
    """Takes one request, and writes the recorded reply block by block."""

    def __init__(
        self, front: ReplayFront, client: Caller, head: RequestHead, kind: CallKind, target: str
    ) -> None:
        self._front, self._client = front, client
        self._head, self._target = head, target
        self._kind: CallKind = kind
        self._request: list[bytes] = []
        self._size = 0
        self._left: list[bytes] = []
        self._is_paused = self._is_over = False
        self._is_whole = self._is_chunked = self._closes = True

    def start(self) -> None:
        """Waits for the request's content."""

    def request_block(self, data: bytes) -> None:
        """Takes a part of the request's content."""
        self._size += len(data)
        if self._size <= _MOST_BYTES:
            self._request.append(data)

    def request_end(self) -> None:
        """Begins the reply."""
        found = self._front.find(self._head, self._kind, self._target, b"".join(self._request))
        if isinstance(found, Refused):
            self._client.transport.write(found.reply())
            self._end()
            self._client.done(is_request_whole=True, closes=True)
            return
        reply, self._is_whole = found.reply, found.is_whole
        data = reply.content.data
        is_stream = bool(reply.blocks) or _is_event_stream(reply.headers)
        self._is_chunked = is_stream and self._client.takes_chunks
        self._closes = self._client.closes or (is_stream and not self._is_chunked)
        headers = [(name.encode("latin-1"), value.encode("latin-1", "replace"))
                   for name, value in reply.headers]  # fmt: skip
        if not is_stream:
            headers.append((b"Content-Length", b"%d" % (len(data) + (not self._is_whole))))
        place = f"{found.entry.path.name}:{found.entry.line}; {found.number} of {found.total}"
        headers.append((b"X-Stillroom-Replay", place.encode()))
        self._client.transport.write(
            reply_bytes(
                reply.status, reply.reason.encode("latin-1", "replace"), headers,
                is_chunked=self._is_chunked, closes=self._closes,
            )
        )  # fmt: skip
        self._left = _blocks(data, reply.blocks) if is_stream else [data]
        self._left.reverse()
        self._write_next()

    def _write_next(self) -> None:
        """Writes the next block; each in a turn of the event loop, so that they come apart."""
        if self._is_over or self._is_paused:
            return
        if self._left:
            block = self._left.pop()
            if block:
                framed = b"%x\r\n%b\r\n" % (len(block), block) if self._is_chunked else block
                self._client.transport.write(framed)
            self._front.loop.call_soon(self._write_next)
            return
        self._end()
        if not self._is_whole:
            self._client.cut_off(is_framed=self._is_chunked or not self._closes)
            return
        if self._is_chunked:
            self._client.transport.write(b"0\r\n\r\n")
        self._client.done(is_request_whole=True, closes=self._closes)

    def client_lost(self) -> None:
        """Breaks off, since nobody reads the reply."""
        self._end()

    def pause(self) -> None:
        """Writes nothing until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        if self._is_paused:
            self._is_paused = False
            self._write_next()

    def _end(self) -> None:
        self._is_over = True
        self._front.ended(self)


def _is_event_stream(headers: list[tuple[str, str]]) -> bool:
    kinds = (value for name, value in headers if name.lower() == "content-type")
    return next(kinds, "").lower().startswith("text/event-stream")


def _blocks(data: bytes, sizes: list[int]) -> list[bytes]:
    """Returns a stream in the blocks in which it came; each event by itself if nothing says."""
    if sum(sizes) != len(data):
        return [event for event in _EVENT.findall(data) if event]
    blocks: list[bytes] = []
    place = 0
    for size in sizes:
        blocks.append(data[place : place + size])
        place += size
    return blocks

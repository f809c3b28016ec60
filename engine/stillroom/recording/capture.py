"""What is kept of a call while it passes through, and the record that this becomes."""

import functools
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import uuid4

import msgspec

from stillroom.recording.encodings import Decoder, UndecodableError
from stillroom.recording.headers import (
    SESSION_HEADER,
    Headers,
    RequestHead,
    keys_in,
    recorded_reply_headers,
    recorded_request_headers,
    without_keys,
)
from stillroom.recording.records import (
    CallEnd,
    CallKind,
    Content,
    RecordedCall,
    RecordedReply,
    RecordedRequest,
    content_of,
    encoded_ahead,
    encoded_call,
)
from stillroom.recording.scrubbing import StreamText, redactor_of, scrubbed
from stillroom.recording.upstreams import Upstream
from stillroom.secrecy.redaction import Redactor

_STREAM = "text/event-stream"
_LAST_EVENT = re.compile(
    rb"\n(?:data: ?\[DONE\]"
    rb"|event: ?(?:message_stop|error|response\.(?:completed|incomplete|failed))\r?\n"
    rb'|data: ?\{"type": ?"(?:message_stop|response\.(?:completed|incomplete|failed))")'
)
"""The event after which a program takes a stream for ended. In the texts of a stream line ends are
escaped, so none of them looks like it."""
_TAIL = 80
_LONGEST_KEY = 4096
NOT_DECODED = "its encoding could not be undone"


class Kept:
    """The bytes of one content as they pass by, up to a limit."""

    def __init__(self, limit: int, decoder: Decoder | None = None) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.cut: str | None = None
        """Why a part of the content is missing; None if it is whole."""
        self.limit, self._decoder = limit, decoder

    def add(self, data: bytes) -> bytes:
        """Keeps bytes, and returns them without their encoding; nothing beyond the limit."""
        if self.cut is not None:
            return b""
        if self._decoder is not None:
            try:
                data = self._decoder.decode(data, self.limit - self.size + 1)
            except UndecodableError as error:
                self.cut = f"{NOT_DECODED}: {error}"
                return b""
        if self.size + len(data) > self.limit:
            data = data[: self.limit - self.size]
            self.cut = f"it is longer than {self.limit} bytes"
        if data:
            self.parts.append(data)
            self.size += len(data)
        return data

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing so far."""
        return self.cut is None


class CallCapture:
    """A call that is being recorded.

    The client waits for the end of its reply until the call is in the journal, so what can be made
    of the record before is made while the call goes on: `prepare` and `read_on` are called where
    nobody waits for them. `limit` is the most bytes that are kept of the request, and of the reply;
    `secrets` are as secret as the keys that the request shows.
    """

    def __init__(
        self,
        kind: CallKind,
        upstream: Upstream,
        head: RequestHead,
        *,
        limit: int,
        secrets: Sequence[str] = (),
    ) -> None:
        self.request = Kept(limit)
        self._kind: CallKind = kind
        self._upstream, self._head, self._limit = upstream, head, limit
        self._secrets = secrets
        self._began, self._began_at = time.perf_counter(), time.time()
        self._first_block: float | None = None
        self._prepared: RecordedCall | None = None
        self._reply: Kept | None = None
        self._stream: StreamText | None = None
        self._status: tuple[int, str] = (0, "")
        self._headers = Headers()
        self._reply_head: RecordedReply | None = None
        self._tail = b"\n"

    @functools.cached_property
    def _redactor(self) -> Redactor:
        return redactor_of((*dict.fromkeys(keys_in(self._head)), *self._secrets))

    def prepare(self) -> None:
        """Makes what the record says of the request, which has come whole."""
        self._prepared = self._call()

    def begin_reply(self, status: int, reason: str, headers: Headers) -> None:
        """Takes the head of the reply."""
        self._status, self._headers = (status, reason), headers
        if headers.get("content-type", "").lower().startswith(_STREAM):
            self._stream = StreamText(self._redactor)
        self._reply = _kept(headers.get("content-encoding", ""), self._limit)

    def add(self, data: bytes) -> bool:
        """Keeps bytes of the reply. Returns whether a program takes the stream for ended now."""
        if self._first_block is None:
            self._first_block = time.perf_counter()
        data = self._reply.add(data) if self._reply else b""
        if self._stream is None or not data:
            return False
        self._stream.add(data)
        window = self._tail + data
        start = window.rfind(b"\n")
        # A long line is none of the events, and what follows is not the beginning of one.
        self._tail = window[start:] if start >= 0 and len(window) - start <= _TAIL else b"-"
        return _LAST_EVENT.search(window) is not None

    def read_on(self) -> None:
        """Makes what the record says of a stream so far."""
        if self._stream is not None:
            self._stream.read_on()
            self._reply_head = self._reply_head or self._reply_without_content()

    def line(self, end: CallEnd, problem: str | None = None) -> bytes:
        """Returns the journal's line of the call, which ends now, without keys."""
        seconds = time.perf_counter() - self._began
        first = self._first_block
        call = msgspec.structs.replace(
            self._prepared or self._call(),
            duration_s=round(seconds, 6),
            first_block_s=None if first is None else round(first - self._began, 6),
            end=end,
            problem=None if problem is None else self._redactor.text(problem),
            reply=self._reply_record(),
        )
        return encoded_call(call)

    def _call(self) -> RecordedCall:
        """Returns the record of the call as it is before there is a reply."""
        redactor, session = self._redactor, self._head.headers.get(SESSION_HEADER)
        began_at = datetime.fromtimestamp(self._began_at, UTC)
        request = msgspec.json.encode(self._request_record())
        return RecordedCall(
            stillroom_record=1,
            id=uuid4().hex,
            kind=self._kind,
            path=redactor.text(without_keys(self._head.target)),
            upstream=self._upstream.origin,
            provider=self._upstream.provider,
            started_at=began_at.isoformat(timespec="milliseconds"),
            duration_s=0.0,
            end="proxy_stopped",
            session=redactor.text(session) if session else None,
            request=encoded_ahead(request, RecordedRequest),
        )

    def _request_record(self) -> RecordedRequest:
        encodings = self._head.headers.get("content-encoding")
        plain = self.request
        if encodings:
            plain = _kept(encodings, self._limit)
            for part in self.request.parts:
                plain.add(part)
            plain.cut = plain.cut or self.request.cut
        headers = recorded_request_headers(self._head.headers)
        content = _content(plain, scrubbed(b"".join(plain.parts), self._redactor))
        return RecordedRequest(content=content, headers=self._redactor.value(headers))

    def _reply_without_content(self) -> RecordedReply:
        (status, reason), text = self._status, self._redactor.text
        headers = [(name, text(value)) for name, value in recorded_reply_headers(self._headers)]
        return RecordedReply(status=status, reason=text(reason), headers=headers, content=Content())

    def _reply_record(self) -> RecordedReply | None:
        reply, stream = self._reply, self._stream
        if reply is None:
            return None
        head = self._reply_head or self._reply_without_content()
        sizes = [len(part) for part in reply.parts] if stream is not None and reply.is_whole else []
        encoded = stream.encoded() if stream is not None else None
        if encoded is not None and reply.is_whole:
            content = Content(text=encoded_ahead(encoded, str))
            return msgspec.structs.replace(head, content=content, blocks=sizes)
        data = b"".join(reply.parts)
        clean = scrubbed(data, self._redactor, stream)
        # Where a key was taken out, other bytes came at once than are there now.
        sizes = sizes if clean is data else []
        return msgspec.structs.replace(head, content=_content(reply, clean), blocks=sizes)


def _kept(encodings: str, limit: int) -> Kept:
    """Returns what keeps a content with these encodings; nothing of it if one is not known."""
    try:
        return Kept(limit, Decoder(encodings) if encodings else None)
    except UndecodableError as error:
        kept = Kept(0)
        kept.cut = f"{NOT_DECODED}: {error}"
        return kept


def _content(kept: Kept, data: bytes) -> Content:
    # A cut may have gone through a key, whose beginning nobody recognises.
    return content_of(data if kept.is_whole else data[:-_LONGEST_KEY], cut=kept.cut)

"""Captures a call while it passes through the proxy, and encodes its journal line."""

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
    is_event_stream,
    recorded_reply_headers,
    recorded_request_headers,
)
from stillroom.recording.records import (
    CallEnd,
    CallKind,
    Content,
    RecordedCall,
    RecordedReply,
    RecordedRequest,
    content_of,
    encode_call,
    preencoded,
)
from stillroom.recording.request_keys import request_keys
from stillroom.recording.scrubbing import StreamText, redactor_of, scrub
from stillroom.recording.upstreams import Upstream
from stillroom.secrecy.key_fields import without_keys, without_signatures

_LAST_EVENT = re.compile(
    rb"\n(?:data: ?\[DONE\]"
    rb"|event: ?(?:message_stop|error|response\.(?:completed|incomplete|failed))\r?\n"
    rb'|data: ?\{"type": ?"(?:message_stop|response\.(?:completed|incomplete|failed))")'
)
"""The event after which a client stops reading a stream. Newlines in the JSON of an event are
escaped, so text inside an event cannot match."""
_MAX_TAIL = 80
"""The length in bytes of the longest incomplete line that may still become a `_LAST_EVENT`."""
_LONGEST_KEY = 4096
NOT_DECODED = "its content encoding could not be decoded"


class CapturedBody:
    """The decoded body of a request or reply, up to `limit` bytes."""

    def __init__(self, limit: int, decoder: Decoder | None = None) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.cut: str | None = None
        """Why a part of the body is missing; None if it is complete."""
        self.limit, self._decoder = limit, decoder

    def add(self, data: bytes) -> bytes:
        """Captures the next bytes and returns them, decoded and cut at the limit."""
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
    def is_complete(self) -> bool:
        """Whether everything that has arrived so far is captured."""
        return self.cut is None


class CallCapture:
    """A call that is being recorded.

    The client gets the end of its reply only after the call is in the journal. To keep that wait
    short, `prepare` and `process_pending` encode most of the record while the call is in progress.
    `limit` is the maximum number of bytes recorded per request and per reply. `secrets` are removed
    from the record, in addition to the API keys in the request itself.
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
        self.request = CapturedBody(limit)
        self._kind: CallKind = kind
        self._upstream, self._head, self._limit = upstream, head, limit
        self._secrets = secrets
        self._redactor = redactor_of((*request_keys(head, b""), *secrets))
        self._body = self.request
        """The request's body without its content encoding."""
        self._start_counter, self._started_at = time.perf_counter(), time.time()
        self._first_block: float | None = None
        self._prepared: RecordedCall | None = None
        self._reply: CapturedBody | None = None
        self._stream: StreamText | None = None
        self._status: tuple[int, str] = (0, "")
        self._headers = Headers()
        self._reply_head: RecordedReply | None = None
        self._tail = b"\n"

    def request_content(self) -> bytes:
        """Returns the decoded body of a request that has arrived completely."""
        self._decode_request()
        return b"".join(self._body.parts)

    def prepare(self) -> None:
        """Encodes the record of a request that has arrived completely."""
        self._decode_request()
        self._prepared = self._call_without_reply()

    def _decode_request(self) -> None:
        """Decodes the part of the request's body that has arrived, and finds the API keys in it."""
        encodings = self._head.headers.get("content-encoding")
        if encodings:
            self._body = _new_body(encodings, self._limit)
            for part in self.request.parts:
                self._body.add(part)
            self._body.cut = self._body.cut or self.request.cut
        keys = request_keys(self._head, b"".join(self._body.parts))
        redactor = redactor_of((*keys, *self._secrets))
        if redactor.secrets == self._redactor.secrets:
            return
        self._redactor = redactor
        if self._stream is not None and self._reply is not None:
            # The reply began before the end of the request, so it was searched without these keys.
            self._stream, self._reply_head = StreamText(redactor), None
            for part in self._reply.parts:
                self._stream.add(part)

    def begin_reply(self, status: int, reason: str, headers: Headers) -> None:
        """Captures the status and headers of the reply."""
        self._status, self._headers = (status, reason), headers
        if is_event_stream(headers):
            self._stream = StreamText(self._redactor)
        self._reply = _new_body(headers.get("content-encoding", ""), self._limit)

    def add(self, data: bytes) -> bool:
        """Captures the reply's next bytes; returns whether clients stop reading after them."""
        if self._first_block is None:
            self._first_block = time.perf_counter()
        data = self._reply.add(data) if self._reply else b""
        if self._stream is None or not data:
            return False
        self._stream.add(data)
        window = self._tail + data
        start = window.rfind(b"\n")
        # A longer line is not a last event; "-" keeps its end from looking like a new line.
        self._tail = window[start:] if start >= 0 and len(window) - start <= _MAX_TAIL else b"-"
        return _LAST_EVENT.search(window) is not None

    def process_pending(self) -> None:
        """Encodes the part of a streamed reply that has arrived."""
        if self._stream is not None:
            self._stream.process_pending()
            self._reply_head = self._reply_head or self._reply_without_content()

    def encode_line(self, end: CallEnd, problem: str | None = None) -> bytes:
        """Ends the call, and returns its journal line without API keys."""
        seconds = time.perf_counter() - self._start_counter
        if self._prepared is None:
            self._decode_request()
        first = self._first_block
        call = msgspec.structs.replace(
            self._prepared or self._call_without_reply(),
            duration_s=round(seconds, 6),
            first_block_s=None if first is None else round(first - self._start_counter, 6),
            end=end,
            problem=None if problem is None else self._redactor.redact_text(problem),
            reply=self._reply_record(),
        )
        return encode_call(call)

    def _call_without_reply(self) -> RecordedCall:
        """Returns the record of the call without its reply."""
        redactor, session = self._redactor, self._head.headers.get(SESSION_HEADER)
        started_at = datetime.fromtimestamp(self._started_at, UTC)
        request = msgspec.json.encode(self._request_record())
        return RecordedCall(
            stillroom_record=1,
            id=uuid4().hex,
            kind=self._kind,
            path=redactor.redact_text(without_keys(self._head.target)),
            upstream=self._upstream.origin,
            provider=self._upstream.provider,
            started_at=started_at.isoformat(timespec="milliseconds"),
            duration_s=0.0,
            end="proxy_stopped",
            session=redactor.redact_text(session) if session else None,
            request=preencoded(request, RecordedRequest),
        )

    def _request_record(self) -> RecordedRequest:
        headers = recorded_request_headers(self._head.headers)
        data = without_signatures(scrub(b"".join(self._body.parts), self._redactor))
        content = _content(self._body, data)
        return RecordedRequest(content=content, headers=self._redactor.redact_value(headers))

    def _reply_without_content(self) -> RecordedReply:
        """Returns the record of the reply's status and headers."""
        (status, reason), text = self._status, self._redactor.redact_text
        headers = [
            (name, text(without_keys(value)))
            for name, value in recorded_reply_headers(self._headers)
        ]
        return RecordedReply(status=status, reason=text(reason), headers=headers, content=Content())

    def _reply_record(self) -> RecordedReply | None:
        """Returns the record of the reply; None if none arrived."""
        reply, stream = self._reply, self._stream
        if reply is None:
            return None
        head = self._reply_head or self._reply_without_content()
        sizes = [len(part) for part in reply.parts] if stream and reply.is_complete else []
        encoded = stream.finish() if stream is not None else None
        if encoded is not None and reply.is_complete:
            content = Content(text=preencoded(encoded, str))
            return msgspec.structs.replace(head, content=content, blocks=sizes)
        data = b"".join(reply.parts)
        clean = scrub(data, self._redactor, stream)
        # Removing a key changed the sizes of the blocks.
        sizes = sizes if clean is data else []
        return msgspec.structs.replace(head, content=_content(reply, clean), blocks=sizes)


def _new_body(encodings: str, limit: int) -> CapturedBody:
    """Returns a capture for a body with these encodings; if one is unknown, it captures nothing."""
    try:
        return CapturedBody(limit, Decoder(encodings) if encodings else None)
    except UndecodableError as error:
        body = CapturedBody(0)
        body.cut = f"{NOT_DECODED}: {error}"
        return body


def _content(body: CapturedBody, data: bytes) -> Content:
    """Returns the record of a body; `data` is its content without API keys."""
    # The body may be cut inside a key, and the beginning of a key might not be recognised.
    return content_of(data if body.is_complete else data[:-_LONGEST_KEY], cut=body.cut)

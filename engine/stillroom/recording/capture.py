"""What is kept of a call while it passes through, and the record that this becomes."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

from stillroom.recording.encodings import Decoder, UndecodableError
from stillroom.recording.heads import (
    SESSION_HEADER,
    Header,
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
    encoded_call,
)
from stillroom.recording.scrubbing import redactor_of, scrubbed
from stillroom.recording.upstreams import Upstream
from stillroom.secrecy.redaction import Redactor

_STREAM = b"text/event-stream"
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


@dataclass(slots=True)
class CallCapture:
    """A call that is being recorded."""

    kind: CallKind
    upstream: Upstream
    head: RequestHead
    limit: int
    """The most bytes that are kept of the request, and of the reply."""
    began: float = field(default_factory=time.perf_counter)
    began_at: float = field(default_factory=time.time)
    first_block: float | None = None
    reply: Kept | None = None
    is_stream: bool = False
    _status: tuple[int, bytes] = (0, b"")
    _headers: Sequence[Header] = ()
    _tail: bytes = b"\n"

    def begin_reply(self, status: int, reason: bytes, headers: Sequence[Header]) -> None:
        """Takes the head of the reply."""
        self._status, self._headers = (status, reason), headers
        named = {key.lower(): value for key, value in headers}
        self.is_stream = named.get(b"content-type", b"").lower().startswith(_STREAM)
        encodings = named.get(b"content-encoding", b"").decode("latin-1")
        try:
            decoder = Decoder(encodings) if encodings else None
        except UndecodableError as error:
            self.reply = Kept(0)
            self.reply.cut = f"{NOT_DECODED}: {error}"
        else:
            self.reply = Kept(self.limit, decoder)

    def add(self, data: bytes) -> bool:
        """Keeps bytes of the reply. Returns whether a program takes the stream for ended now."""
        if self.first_block is None:
            self.first_block = time.perf_counter()
        data = self.reply.add(data) if self.reply else b""
        if not self.is_stream or not data:
            return False
        window = self._tail + data
        start = window.rfind(b"\n")
        # A long line is none of the events, and what follows is not the beginning of one.
        self._tail = window[start:] if start >= 0 and len(window) - start <= _TAIL else b"-"
        return _LAST_EVENT.search(window) is not None

    def line(
        self, end: CallEnd, ended: float, request: Kept, problem: str | None, secrets: Sequence[str]
    ) -> bytes:
        """Returns the journal's line of the call, from which keys have been taken.

        `ended` is when the reply ended, `secrets` what is no key of the request and as secret.
        """
        redactor = redactor_of((*dict.fromkeys(keys_in(self.head)), *secrets))
        session = self.head.get(SESSION_HEADER)
        began_at = datetime.fromtimestamp(self.began_at, UTC)
        first = self.first_block
        call = RecordedCall(
            stillroom_record=1,
            id=uuid4().hex,
            kind=self.kind,
            path=redactor.text(without_keys(self.head.target)),
            upstream=self.upstream.origin,
            provider=self.upstream.provider,
            started_at=began_at.isoformat(timespec="milliseconds"),
            duration_s=round(ended - self.began, 6),
            first_block_s=None if first is None else round(first - self.began, 6),
            end=end,
            session=redactor.text(session.decode("utf-8", "replace")) if session else None,
            problem=None if problem is None else redactor.text(problem),
            request=RecordedRequest(
                content=_content(_plain_request(request, self.head), redactor),
                headers=redactor.value(recorded_request_headers(self.head)),
            ),
            reply=None if self.reply is None else self._recorded_reply(self.reply, redactor),
        )
        return encoded_call(call)

    def _recorded_reply(self, reply: Kept, redactor: Redactor) -> RecordedReply:
        status, reason = self._status
        content = _content(reply, redactor, is_stream=self.is_stream)
        sizes = [len(part) for part in reply.parts] if self.is_stream else []
        headers = recorded_reply_headers(self._headers)
        return RecordedReply(
            status=status,
            reason=redactor.text(reason.decode("latin-1")),
            headers=[(name, redactor.text(value)) for name, value in headers],
            content=content,
            # Where a key was taken out, other bytes came at once than are there now.
            blocks=sizes if content.num_bytes == reply.size else [],
        )


def _plain_request(request: Kept, head: RequestHead) -> Kept:
    """Returns the content of a request without its content encoding, which few have."""
    encodings = (head.get(b"content-encoding") or b"").decode("latin-1")
    if not encodings:
        return request
    try:
        plain = Kept(request.limit, Decoder(encodings))
    except UndecodableError as error:
        plain = Kept(0)
        plain.cut = f"{NOT_DECODED}: {error}"
        return plain
    for part in request.parts:
        plain.add(part)
    plain.cut = plain.cut or request.cut
    return plain


def _content(kept: Kept, redactor: Redactor, *, is_stream: bool = False) -> Content:
    data = scrubbed(b"".join(kept.parts), redactor, is_stream=is_stream)
    if kept.cut is not None:
        # The cut may have gone through a key, whose beginning nobody recognises.
        data = data[:-_LONGEST_KEY]
    return content_of(data, cut=kept.cut)

"""The format of a recorded call, which is one line of a journal."""

import base64
import re
from typing import Literal, TypeVar, cast

import msgspec

T = TypeVar("T")
CallKind = Literal["chat", "responses", "messages"]
"""The API of a call: OpenAI's chat completions or Responses, or Anthropic's Messages."""
CallEnd = Literal["whole", "client_left", "upstream_left", "proxy_stopped"]
"""`whole` if the reply is complete, or else who ended it early."""

BEGINNING = b'{"stillroom_record":1,'
"""The first bytes of every journal line."""
JOURNAL_NAME = re.compile(r"calls-\d{4,}\.jsonl")

_THREAD_MESSAGES = re.compile(r"/threads/[^/]+/messages$")
"""The path that adds a message to a thread of OpenAI's Assistants API; it calls no model."""
_KINDS: dict[str, CallKind] = {
    "/chat/completions": "chat",
    "/responses": "responses",
    "/messages": "messages",
}


def call_kind(method: str, path: str) -> CallKind | None:
    """Returns the API that a request calls; None if it calls no model, and is not recorded."""
    if method != "POST":
        return None
    path = path.partition("?")[0].rstrip("/")
    if _THREAD_MESSAGES.search(path):
        return None
    return next((kind for end, kind in _KINDS.items() if path.endswith(end)), None)


class Content(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a request or reply, decoded from its transfer and content encodings."""

    text: str | None = None
    """The content, if it is UTF-8."""
    base64: str | None = None
    """The content in base64, if it is not UTF-8."""
    cut: str | None = None
    """Why a part of the content is missing; None if it is complete."""

    @property
    def data(self) -> bytes:
        """The bytes of the content."""
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        return (self.text or "").encode()


def content_of(data: bytes, *, cut: str | None = None) -> Content:
    """Returns a Content with these bytes as text, or as base64 if they are not UTF-8."""
    try:
        return Content(text=data.decode(), cut=cut)
    except UnicodeDecodeError:
        return Content(base64=base64.b64encode(data).decode(), cut=cut)


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request, without API keys."""

    content: Content
    headers: dict[str, str] = {}
    """The headers that affect the model's answer or name the client."""


class RecordedReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reply, or the part of it that arrived."""

    status: int
    reason: str = ""
    headers: list[tuple[str, str]] = []
    """The headers in order, without hop-by-hop headers, encodings and cookies."""
    content: Content
    blocks: list[int] = []
    """The sizes in bytes of the blocks in which a stream's `content` arrived."""


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call, one line of a journal. The JSON keys never change."""

    stillroom_record: Literal[1]
    """The version of the format."""
    id: str
    kind: CallKind
    path: str
    """The path and query at the upstream, without API keys."""
    upstream: str
    """The scheme, host and port to which the call was sent."""
    started_at: str
    """When the request arrived (ISO 8601)."""
    duration_s: float
    """Seconds from the request to the end of the reply."""
    first_block_s: float | None = None
    """Seconds from the request to the first bytes of the reply's body."""
    end: CallEnd
    provider: str | None = None
    session: str | None = None
    """The client's id of the conversation, from the header `x-stillroom-session`."""
    problem: str | None = None
    """Why the reply is missing or incomplete."""
    request: RecordedRequest
    reply: RecordedReply | None = None


_DECODER = msgspec.json.Decoder(RecordedCall)


def decode_call(line: bytes | memoryview) -> RecordedCall:
    """Decodes a line of a journal. Raises ValueError (or msgspec's subclass of it)."""
    return _DECODER.decode(line)


def preencoded(data: bytes, _field_type: type[T]) -> T:
    """Wraps JSON text so that msgspec inserts it unchanged into a field of this type."""
    return cast("T", msgspec.Raw(data))


def encode_call(call: RecordedCall) -> bytes:
    """Encodes a call as a line of a journal, with the newline."""
    # `omit_defaults` keeps the version first, since it has no default.
    return msgspec.json.encode(call) + b"\n"

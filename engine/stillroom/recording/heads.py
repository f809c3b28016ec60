"""The heads of requests and replies: which headers go on, which are recorded, which hold keys."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_plus

from stillroom.secrecy.redaction import is_secret_name

Header = tuple[bytes, bytes]
SESSION_HEADER = b"x-stillroom-session"
TOKEN_HEADER = b"x-stillroom-token"
KEY_MARK = "[key]"

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_OURS = frozenset((SESSION_HEADER, TOKEN_HEADER, b"host", b"expect"))
_RECORDED = frozenset(
    (b"content-type", b"user-agent", b"anthropic-version", b"anthropic-beta", b"openai-beta")
)
_NOT_RECORDED = frozenset((b"content-length", b"content-encoding", b"set-cookie", b"date"))
_KEY_HEADERS = frozenset((b"authorization", b"cookie", b"proxy-authorization"))
_SCHEME = re.compile(rb"(?i)^(?:bearer|basic|token|key)\s+")
_QUERY_FIELD = re.compile(r"(?P<name>[^&=]*)=(?P<value>[^&]*)")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The first line of a request and its headers, as they came."""

    method: str
    target: str
    """The path and query, without the token and the upstream's name."""
    headers: Sequence[Header]
    is_http_1_0: bool = False

    def get(self, name: bytes) -> bytes | None:
        """Returns the first value of a header, whose name is in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def is_chunked(self) -> bool:
        """Whether the content comes in chunks."""
        return self.get(b"transfer-encoding") is not None


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Returns the headers that a proxy passes on: all but those of the connection itself."""
    headers = list(headers)
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    # What says where a content ends is never a matter of one connection.
    dropped = _HOP_BY_HOP | (named - {b"content-length"})
    return [(key, value) for key, value in headers if key.lower() not in dropped]


def request_bytes(head: RequestHead, host: str, *, accepted: bytes | None) -> bytes:
    """Returns the head that goes upstream; `accepted` stands for its Accept-Encoding, if given."""
    lines = [f"{head.method} {head.target} HTTP/1.1\r\nHost: {host}\r\n".encode("latin-1")]
    for key, value in end_to_end(head.headers):
        name = key.lower()
        if name in _OURS:
            continue
        is_changed = name == b"accept-encoding" and accepted is not None
        lines.append(b"%b: %b\r\n" % (key, accepted if is_changed else value))
    if head.is_chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def reply_bytes(
    status: int, reason: bytes, headers: Iterable[Header], *, is_chunked: bool, closes: bool
) -> bytes:
    """Returns the head of a reply to the client."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if is_chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    if closes:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def keys_in(head: RequestHead) -> Iterator[str]:
    """Yields the keys that a request shows: in headers and in its query."""
    for key, value in head.headers:
        name = key.lower()
        if name in _KEY_HEADERS or is_secret_name(name.decode("latin-1")):
            text = value.decode("latin-1")
            yield text
            yield _SCHEME.sub(b"", value).decode("latin-1")
            if name == b"cookie":
                yield from (part.partition("=")[2] for part in text.split("; "))
    for field in _secret_fields(head.target):
        yield field["value"]
        yield unquote_plus(field["value"])


def without_keys(target: str) -> str:
    """Returns a path whose query has marks in place of keys."""
    for field in _secret_fields(target):
        target = target.replace(field[0], f"{field['name']}={KEY_MARK}")
    return target


def _secret_fields(target: str) -> Iterator[re.Match[str]]:
    query = target.partition("?")[2]
    for field in _QUERY_FIELD.finditer(query):
        if field["value"] and is_secret_name(unquote_plus(field["name"])):
            yield field


def recorded_request_headers(head: RequestHead) -> dict[str, str]:
    """Returns the headers of a request that a journal holds; none of them is a key."""
    return {
        key.lower().decode("latin-1"): value.decode("latin-1")
        for key, value in head.headers
        if key.lower() in _RECORDED
    }


def recorded_reply_headers(headers: Iterable[Header]) -> list[tuple[str, str]]:
    """Returns the headers of a reply that a journal holds."""
    return [
        (key.decode("latin-1"), value.decode("latin-1"))
        for key, value in end_to_end(headers)
        if key.lower() not in _NOT_RECORDED and not is_secret_name(key.decode("latin-1"))
    ]

"""Selects the headers of requests and replies that are forwarded and recorded."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from aiohttp import web
from multidict import CIMultiDict

from stillroom.secrecy.redaction import is_secret_name

SESSION_HEADER = "x-stillroom-session"
TOKEN_HEADER = "x-stillroom-token"  # noqa: S105 (the name of a header)

_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_PROXY_HEADERS = frozenset((SESSION_HEADER, TOKEN_HEADER, "host", "expect"))
_RECORDED = frozenset(
    ("content-type", "user-agent", "anthropic-version", "anthropic-beta", "openai-beta")
)
_NOT_RECORDED = frozenset(("content-length", "content-encoding", "set-cookie", "date"))

Headers = CIMultiDict[str]


_CONTROL_CHARACTERS = re.compile(r"[\0-\x08\n-\x1f\x7f]")


def decode_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Decodes raw headers as UTF-8, or as Latin-1 where a value is not UTF-8.

    Control characters, which some servers send, become spaces (RFC 9110, 5.5).
    """
    return CIMultiDict((name.decode("latin-1"), _decode_value(value)) for name, value in raw)


def decode_reason(reason: str) -> str:
    """Decodes a reason phrase like a header; in aiohttp's, surrogates stand for invalid bytes."""
    return _decode_value(reason.encode("utf-8", "surrogateescape"))


def _decode_value(value: bytes) -> str:
    """Decodes a header's value, and replaces its control characters with spaces."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = value.decode("latin-1")
    return _CONTROL_CHARACTERS.sub(" ", text)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The request line and headers of a request."""

    method: str
    target: str
    """The path and query, percent-encoded as received."""
    headers: Headers

    @classmethod
    def of(cls, request: web.BaseRequest) -> Self:
        """Returns the head of a request as it was received."""
        return cls(request.method, request.raw_path, decode_headers(request.raw_headers))


def end_to_end_headers(headers: Headers) -> Headers:
    """Returns the headers that a proxy forwards: all but the hop-by-hop ones (RFC 9110, 7.6.1)."""
    listed = ",".join(headers.getall("connection", ())).split(",")
    # Content-Length describes the message, whatever a Connection header says.
    dropped = _HOP_BY_HOP | ({name.strip().lower() for name in listed} - {"content-length"})
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in dropped)


def is_event_stream(headers: Headers) -> bool:
    """Returns whether a reply with these headers is a stream of server-sent events."""
    return headers.get("content-type", "").lower().startswith("text/event-stream")


def upstream_headers(head: RequestHead) -> Headers:
    """Returns the headers of a request that are sent to the upstream."""
    kept = end_to_end_headers(head.headers)
    for name in _PROXY_HEADERS:
        kept.popall(name, None)
    return kept


def recorded_request_headers(headers: Headers) -> dict[str, str]:
    """Returns the headers of a request that are recorded; none of them holds an API key."""
    return {key.lower(): value for key, value in headers.items() if key.lower() in _RECORDED}


def recorded_reply_headers(headers: Headers) -> list[tuple[str, str]]:
    """Returns the headers of a reply that are recorded."""
    return [
        (str(key), value)
        for key, value in end_to_end_headers(headers).items()
        if key.lower() not in _NOT_RECORDED and not is_secret_name(key)
    ]

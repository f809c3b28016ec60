"""The heads of requests and replies: which headers are passed on, recorded, or hold keys."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote_plus

from aiohttp import web
from multidict import CIMultiDict

from stillroom.secrecy.redaction import is_secret_name

SESSION_HEADER = "x-stillroom-session"
TOKEN_HEADER = "x-stillroom-token"  # noqa: S105 (the name of a header)
KEY_MARK = "[key]"

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
_FOR_THE_PROXY = frozenset((SESSION_HEADER, TOKEN_HEADER, "host", "expect"))
_RECORDED = frozenset(
    ("content-type", "user-agent", "anthropic-version", "anthropic-beta", "openai-beta")
)
_NOT_RECORDED = frozenset(("content-length", "content-encoding", "set-cookie", "date"))
_KEY_HEADERS = frozenset(("authorization", "cookie", "proxy-authorization"))
_SCHEME = re.compile(r"(?i)^(?:bearer|basic|token|key)\s+")
_QUERY_FIELD = re.compile(r"(?P<name>[^&=]*)=(?P<value>[^&]*)")

Headers = CIMultiDict[str]


def decoded_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns headers as text: UTF-8, or Latin-1 where a value is not UTF-8."""
    return CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in raw)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The first line of a request and its headers."""

    method: str
    target: str
    """The path and query, still quoted."""
    headers: Headers

    @classmethod
    def of(cls, request: web.BaseRequest) -> Self:
        """Returns the head of a request as it came."""
        return cls(request.method, request.raw_path, decoded_headers(request.raw_headers))


def end_to_end(headers: Headers) -> Headers:
    """Returns the headers that a proxy passes on: all but those of the connection itself."""
    listed = ",".join(headers.getall("connection", ())).split(",")
    # The length of the content is never a matter of one connection.
    dropped = _HOP_BY_HOP | ({name.strip().lower() for name in listed} - {"content-length"})
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in dropped)


def upstream_headers(head: RequestHead) -> Headers:
    """Returns the headers that go to the upstream."""
    kept = end_to_end(head.headers)
    for name in _FOR_THE_PROXY:
        kept.popall(name, None)
    return kept


def keys_in(head: RequestHead) -> Iterator[str]:
    """Yields the keys that a request shows: in its headers and its query."""
    for key, value in head.headers.items():
        name = key.lower()
        if name in _KEY_HEADERS or is_secret_name(name):
            yield value
            yield _SCHEME.sub("", value)
            if name == "cookie":
                yield from (part.partition("=")[2] for part in value.split("; "))
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


def recorded_request_headers(headers: Headers) -> dict[str, str]:
    """Returns the headers of a request that a journal holds; none of them is a key."""
    return {key.lower(): value for key, value in headers.items() if key.lower() in _RECORDED}


def recorded_reply_headers(headers: Headers) -> list[tuple[str, str]]:
    """Returns the headers of a reply that a journal holds."""
    return [
        (str(key), value)
        for key, value in end_to_end(headers).items()
        if key.lower() not in _NOT_RECORDED and not is_secret_name(key)
    ]

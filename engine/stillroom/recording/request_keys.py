"""Finds API keys in a request: in its headers, its URL and the fields of its body."""

import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote_plus, urlsplit

import msgspec

from stillroom.recording.headers import RequestHead
from stillroom.secrecy.redaction import MARK, is_secret_name

_KEY_NAMES = frozenset(
    (
        "apikeystring",
        "auth",
        "connection_string",
        "cookie",
        "proxy-authorization",
        "x-amz-credential",
    )
)
"""Names of headers, parameters and fields whose values are API keys, in addition to names that end
with `signature` or that `is_secret_name` matches."""
_KEY_PARAMETERS = frozenset(("code", "sig"))
"""Names of Azure's URL parameters whose values are keys."""
_HEADERS = frozenset(("headers", "extra_headers", "extraheaders"))
"""The request fields with headers that the endpoint sends to a tool's server."""
_TOKEN = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w.~+=:-]{16,}", re.ASCII)
"""A header value that may be a key, although the header does not have a key's name."""
_NOT_KEY_NAMES = frozenset(("prompt_cache_key", "tool_choice"))
"""Names that look like those of keys, although their values are not keys."""
_AUTH_SCHEME = re.compile(r"^[A-Za-z][\w-]*\s+")
_AUTH_PARAMETER = re.compile(
    r"(?i)\b(?:signature|response|credential|oauth_\w+|token|key)=\"?(?P<value>[^\",\s]+)"
)
"""The parameters of an Authorization header, such as AWS's `Signature=`, that are secret."""
_PARAMETER = re.compile(r"[?&;](?P<name>[^=&;/?]*)=")
_CONVERSATION = frozenset(("messages", "input", "instructions", "system", "prompt"))
"""The request fields with the conversation, which is recorded unchanged."""
_URL = re.compile(r"https?://\S+")
_FIELD = re.compile(rb'"([\w.-]{1,64})"\s*:\s*"((?:[^"\\]++|\\.)*+)', re.DOTALL)


def request_keys(head: RequestHead, body: bytes) -> tuple[str, ...]:
    """Returns the distinct API keys in a request, in all forms in which a reply may repeat them."""
    return tuple(dict.fromkeys((*_keys_in_head(head), *_keys_in_body(body))))


def without_keys(url: str) -> str:
    """Returns a URL, or a path and query, with placeholders for the API keys in it."""
    for start, end in reversed([*_key_spans(url)]):
        url = url[:start] + MARK + url[end:]
    return url


def _is_key_name(name: str) -> bool:
    name = name.lower()
    if name in _NOT_KEY_NAMES:
        return False
    return name in _KEY_NAMES or name.endswith("signature") or is_secret_name(name)


def _keys_in_head(head: RequestHead) -> Iterator[str]:
    for name, value in head.headers.items():
        if _is_key_name(name):
            yield from _secret_forms(value)
    yield from _keys_in_url(head.target)


def _secret_forms(value: str) -> Iterator[str]:
    """Yields the value of a header or field that holds a key, and the secret parts of the value."""
    credentials = _AUTH_SCHEME.sub("", value)
    yield value
    yield credentials
    yield from (part.partition("=")[2] for part in value.split("; "))
    yield from (match["value"] for match in _AUTH_PARAMETER.finditer(value))
    if value.lower().startswith("basic "):
        try:
            login = base64.b64decode(credentials, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return
        yield login
        yield login.partition(":")[2]


def _keys_in_url(url: str) -> Iterator[str]:
    """Yields the keys and the password in a URL, as written and decoded."""
    values = [url[start:end] for start, end in _key_spans(url)]
    with suppress(ValueError):
        values.append(urlsplit(url).password or "")
    for value in values:
        for form in (value, value.partition(";")[0]):
            yield form
            yield unquote_plus(form)


def _key_spans(url: str) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each key among a URL's parameters, in its query or path."""
    query, end = url.find("?"), 0
    for match in _PARAMETER.finditer(url):
        start = match.end()
        name = unquote_plus(match["name"])
        if match.start() < end or not (_is_key_name(name) or name.lower() in _KEY_PARAMETERS):
            continue
        # A semicolon does not end a key: it may be part of it, if only & separates parameters.
        stops = "&" if 0 <= query < start else "/?"
        ends = [index for stop in stops if (index := url.find(stop, start)) >= 0]
        end = min(ends, default=len(url))
        if end > start:
            yield start, end


def _keys_in_body(body: bytes) -> Iterator[str]:
    """Yields the keys in a request body.

    These are in `api_key`, `tools[].authorization`, `tools[].headers`, `domain_secrets[].value`,
    `mcp_servers[]`, `data_sources[]` and any other field outside the conversation with a key's
    name. A field called `value` counts as a key if its object has a key's name.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        pending = [(k, msgspec.json.decode(v)) for k, v in fields.items() if k not in _CONVERSATION]
    except (ValueError, RecursionError):
        # An incomplete body cannot be parsed, so its fields are found by a pattern.
        pending = [(k.decode(), v.decode(errors="replace")) for k, v in _FIELD.findall(body)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += _fields_of(name, cast("dict[str, Any]", value))
        elif isinstance(value, list):
            pending += [(name, item) for item in cast("list[Any]", value)]
        elif isinstance(value, str) and _is_key_name(name):
            yield from _secret_forms(value)
        elif isinstance(value, str) and _URL.fullmatch(value):
            yield from _keys_in_url(value)


def _fields_of(name: str, value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields an object's fields; one whose value is a key gets the name `authorization`."""
    for inner, field in value.items():
        is_token = name.lower() in _HEADERS and isinstance(field, str) and _TOKEN.fullmatch(field)
        if is_token or (inner == "value" and _is_key_name(name)):
            yield "authorization", field
        else:
            yield inner, field

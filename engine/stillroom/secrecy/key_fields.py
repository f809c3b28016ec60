"""Finds API keys by the names of JSON fields and URL parameters.

It knows the request schemas of OpenAI, Anthropic, Google, OpenRouter, Azure, and compatible servers
and gateways. Any other field with the name of a key counts too.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote_plus, urlsplit

import msgspec

from stillroom.secrecy.redaction import MARK, is_secret_name

_KEY_NAMES = frozenset(
    (
        "apikeystring",
        "auth",
        "connection_string",
        "connectionstring",
        "cookie",
        "proxy-authorization",
        "x-amz-credential",
    )
)
"""Names of headers, parameters and fields whose values are API keys, in addition to names that end
with `signature` or that `is_secret_name` matches."""
_CACHE_KEY = "prompt_cache_key"
"""A name that looks like that of a key, although its value is not a key."""
_CREDENTIAL = re.compile(
    r"(^|_)(api_key|(proxy_)?authorization(_token)?|connection_string|private_key"
    r"|(access|auth|bearer|id|refresh)_token|(secret|secret_access)_key|(api|client)_secret)$"
)
"""Names in snake case that mean an API key even in a dataset, unlike `key` and `answer_key`."""
_REQUEST_FIELDS = frozenset(
    (
        "apikeys",
        "datasources",
        "extrabody",
        "extraheaders",
        "litellmparams",
        "mcpservers",
        "provideroptions",
    )
)
"""The fields of requests, in lower case without `_`, that may have keys in them."""
_COMMON_FIELDS = frozenset(("connectors", "plugins", "tools"))
"""Fields of requests that may have keys in them, and that other objects may have too."""
_REQUEST_ONLY_FIELDS = frozenset(
    ("auth", "authorization", "headers", "server_url", "token", "type", "url")
)
"""Fields that tools and plugins have in addition to a name only if they belong to a request."""
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|-")
_KEY_PARAMETERS = frozenset(("code", "sig"))
"""Names of Azure's URL parameters whose values are keys."""
_HEADERS = frozenset(("headers", "extraheaders"))
"""The fields with headers that the endpoint sends to a tool's server."""
_NO_KEY_HEADER = re.compile(r"accept|content-|user-agent|name$|key$", re.IGNORECASE)
_SERVERS = frozenset(("mcpservers", "streamablehttptransport"))
_SERVER_URL = "server_url"
"""The field with the URL of an MCP server, whose path may have a key."""
_EXAMPLES = "input_examples"
_SCHEMA_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_TOKEN = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w.~+/=:-]{16,}", re.ASCII)
"""A value that may be a key, although its field does not have a key's name."""
_OPAQUE = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])\S{16,}")
_PATH_TOKEN = re.compile(
    r"(?=[\w.~=-]*+\Z).*?(?:(?=[A-Za-z]{0,15}+\d)(?=\d{0,15}+[A-Za-z])[A-Za-z0-9]{16}"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})",
    re.ASCII,
)
"""The beginning of a part of a path that may be a key, such as `key-q7Lm2xWv9Rt4Zb8K`."""
_PEM_LINE_END = re.compile(r"(?:[\r\n]|\\+[rn])+")
_AUTH_SCHEME = re.compile(r"^[A-Za-z][\w-]*\s+")
_AUTH_PARAMETER = re.compile(
    r"(?i)\b(?:signature|response|credential|oauth_\w+|token|key)=\"?(?P<value>[^\",\s]+)"
)
"""The parameters of an Authorization header, such as AWS's `Signature=`, that are secret."""
_PARAMETER = re.compile(r"[?&;](?P<name>[^=&;/?]*)=")
_URL = re.compile(r"[A-Za-z][\w+.-]*://\S+")
_STRING = rb'(?:[^"\\]++|\\.)*+'
_MEDIA_URL = re.compile(
    rb'"((?:image|file|video|audio|document)_url"\s*:\s*(?:\{[^{}]{0,99}?"url"\s*:\s*)?'
    rb'|(?:file_data|file_?[uU]ri)"\s*:\s*|type"\s*:\s*"url"\s*,\s*"url"\s*:\s*'
    rb'|url"\s*:\s*(?="' + _STRING + rb'"\s*,\s*"type"\s*:\s*"url"))"(https?:' + _STRING + rb")",
    re.DOTALL,
)
"""The URL of an image or file in the JSON of a request to a model."""


def keys_in_fields(fields: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yields the keys in the fields of a request, in all forms in which a reply may repeat them.

    JSON schemas and examples of a tool's arguments are left out: they only describe keys.
    """
    pending = [*fields]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [] if _is_schema(name, value) else _labelled_fields(name, value)
        elif isinstance(value, list):
            pending += [(name, item) for item in cast("list[Any]", value)]
        elif not isinstance(value, str):
            continue
        elif is_key_name(name):
            if (key_file := _json_object(value)) is not None:
                pending.append((name, key_file))
            yield from secret_forms(value)
        elif _URL.fullmatch(value):
            yield from keys_in_url(value)
            if name == _SERVER_URL:
                path = unquote_plus(value.partition("?")[0]).split("/")[3:]
                yield from filter(_PATH_TOKEN.match, path)


def _labelled_fields(name: str, fields: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the fields of the object `name`; those that hold keys get the name of a key.

    Which field holds a key may depend on the object: `value` next to a name, or any header.
    """
    kind = _normalized(name)
    labels = (name, fields.get("name"), fields.get("key"))
    key_label = next((each for each in labels if isinstance(each, str) and is_key_name(each)), None)
    labelled: list[tuple[str, Any]] = []
    for inner, field in fields.items():
        label, is_token = inner, isinstance(field, str) and _TOKEN.fullmatch(_without_scheme(field))
        if inner == "value" and key_label is not None:
            label = key_label
        elif inner == "key" and "value" in fields:
            label = ""  # an attribute's name, as in the filters of a file search
        elif inner == "url" and (kind in _SERVERS or fields.get("type") == "mcp_server"):
            label = _SERVER_URL
        elif is_token and kind in _HEADERS and not _NO_KEY_HEADER.match(inner):
            label = "authorization"
        elif is_token and is_key_name(name) and inner != "name":
            label = name
        labelled.append((label, field))
    return labelled


def _json_object(value: str) -> dict[str, Any] | None:
    """Returns the object in a JSON text, such as a service account's key file, or None."""
    try:
        return msgspec.json.decode(value, type=dict[str, Any]) if value.startswith("{") else None
    except (ValueError, RecursionError):
        return None


def _is_schema(name: str, fields: dict[str, Any]) -> bool:
    """Returns whether an object is a JSON schema of arguments, or an example of arguments."""
    kind = fields.get("type")
    is_type = isinstance(kind, list) or str(kind).lower() in _SCHEMA_TYPES
    return name == _EXAMPLES or (is_type and "value" not in fields)


def is_key_name(name: str) -> bool:
    """Returns whether a header, parameter or field of a request with this name holds a key."""
    name = name.lower()
    if name == _CACHE_KEY:
        return False
    return name in _KEY_NAMES or name.endswith("signature") or is_secret_name(name)


def holds_keys(name: str, value: Any, *, is_answer: bool = False) -> bool:
    """Returns whether a field of a dataset, or an item of it, holds keys of a request.

    is_answer: whether the field is part of an expected answer, whose values must not change; then
    only fields that occur in nothing but requests are considered.
    """
    if isinstance(value, str):
        return (
            not is_answer
            and _is_credential(name)
            and _OPAQUE.fullmatch(_without_scheme(value)) is not None
        )
    kind = _normalized(name)
    if kind in _COMMON_FIELDS:
        return not is_answer and _is_of_request(value)
    return kind in _REQUEST_FIELDS


def _is_of_request(entry: Any) -> bool:
    """Returns whether an entry of `tools` or `plugins` has the fields of one in a request."""
    return isinstance(entry, dict) and (
        "name" not in entry or bool(_REQUEST_ONLY_FIELDS & entry.keys())
    )


@lru_cache(maxsize=4096)
def _is_credential(name: str) -> bool:
    return _CREDENTIAL.search(_WORD_START.sub("_", name).lower()) is not None


def _normalized(name: str) -> str:
    return name.lower().replace("_", "")


def _without_scheme(value: str) -> str:
    """Returns the value of a header without its scheme, such as `Bearer`."""
    return _AUTH_SCHEME.sub("", value)


def secret_forms(value: str) -> Iterator[str]:
    """Yields the value of a header or field that holds a key, and the secret parts of the value.

    A value with characters that JSON escapes is also yielded in its escaped forms. A private key in
    PEM form is yielded line by line instead: its lines are the same in all forms.
    """
    yield value
    if "-----BEGIN" in value:
        yield from _PEM_LINE_END.split(value)
        return
    credentials = _without_scheme(value)
    yield credentials
    yield from _escaped_forms(value)
    yield from (part.partition("=")[2] for part in value.split("; "))
    yield from (match["value"] for match in _AUTH_PARAMETER.finditer(value))
    if value.lower().startswith("basic "):
        try:
            login = base64.b64decode(credentials, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return
        yield login
        yield login.partition(":")[2]


def _escaped_forms(value: str) -> Iterator[str]:
    """Yields a value as in the strings of JSON texts, and of JSON texts in such strings."""
    for form in (msgspec.json.encode(value).decode()[1:-1], json.dumps(value)[1:-1]):
        yield form
        yield msgspec.json.encode(form).decode()[1:-1]
        yield json.dumps(form)[1:-1]


def keys_in_url(url: str) -> Iterator[str]:
    """Yields the keys and the password in a URL, as written and decoded."""
    values = [url[start:end] for start, end in _key_spans(url)]
    with suppress(ValueError):
        values.append(urlsplit(url).password or "")
    for value in values:
        for form in (value, value.partition(";")[0]):
            yield form
            yield unquote_plus(form)


def without_keys(url: str) -> str:
    """Returns a URL, or a path and query, with placeholders for the API keys in it."""
    parts, done = list[str](), 0
    for start, end in _key_spans(url):
        parts += [url[done:start], MARK]
        done = end
    return "".join([*parts, url[done:]])


def _key_spans(url: str) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each key among a URL's parameters, in its query or path."""
    query, end = len(url.partition("?")[0]), 0
    for match in _PARAMETER.finditer(url):
        start = match.end()
        name = unquote_plus(match["name"])
        if match.start() < end or not (is_key_name(name) or name.lower() in _KEY_PARAMETERS):
            continue
        # A semicolon does not end a key, since it may be part of the key if & separates parameters.
        stop, limit = ("&", len(url)) if start > query else ("/", query)
        found = url.find(stop, start, limit)
        end = limit if found < 0 else found
        if end > start:
            yield start, end


def without_signatures(request: bytes) -> bytes:
    """Returns the JSON of a request with placeholders for keys in the URLs of images and files.

    The signature in such a URL is a key to the file. No reply repeats it, so it is not searched for
    elsewhere.
    """

    def clean(match: re.Match[bytes]) -> bytes:
        url = match[2].decode("utf-8", "surrogateescape").replace("\\u0026", "&")
        without = without_keys(url)
        if without == url:
            return match[0]
        return b'"%b"%b' % (match[1], without.encode("utf-8", "surrogateescape"))

    return _MEDIA_URL.sub(clean, request)

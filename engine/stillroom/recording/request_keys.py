"""Finds API keys in a request: in its headers, its URL and the fields of its body."""

import re
from collections.abc import Iterator
from itertools import chain

import msgspec

from stillroom.recording.headers import RequestHead
from stillroom.secrecy.key_fields import (
    is_key_name,
    keys_in_fields,
    keys_in_url,
    secret_forms,
)

_CONVERSATION_FIELDS = frozenset(("messages", "input", "instructions", "system", "prompt"))
"""The request fields that hold the conversation, which is recorded unchanged."""
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+(?P<end>"?)|[\[\]{}]', re.DOTALL)
_PARTIAL_CHARACTER = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\u[0-9a-fA-F]{0,3})?$|[\xc0-\xff][\x80-\xbf]{0,2}$"
)
_PARTIAL_LITERAL = re.compile(rb"[\w.+-]{1,32}$")
"""Match an incomplete character, number or name at the end of a truncated body."""
_FIELD = re.compile(rb'"([\w.-]{1,64})"\s*:\s*"((?:[^"\\]++|\\.)*+)', re.DOTALL)


def request_keys(head: RequestHead, body: bytes) -> tuple[str, ...]:
    """Returns the distinct API keys in a request, in all forms in which a reply may repeat them."""
    return tuple(dict.fromkeys((*_api_keys_in_head(head), *_api_keys_in_body(body))))


def _api_keys_in_head(head: RequestHead) -> Iterator[str]:
    for name, value in head.headers.items():
        if is_key_name(name):
            yield from secret_forms(value)
    yield from keys_in_url(head.target)


def _api_keys_in_body(body: bytes) -> Iterator[str]:
    """Yields the API keys in the fields of a request body, except those of the conversation.

    The body may be truncated.
    """
    for candidate in chain([body], _completed_bodies(body)):
        try:
            fields = msgspec.json.decode(candidate, type=dict[str, msgspec.Raw])
            other_fields = [
                (k, msgspec.json.decode(v))
                for k, v in fields.items()
                if k not in _CONVERSATION_FIELDS
            ]
            break
        except (ValueError, RecursionError):
            continue
    else:
        other_fields = [(k.decode(), v.decode(errors="replace")) for k, v in _FIELD.findall(body)]
    yield from keys_in_fields(other_fields)


def _completed_bodies(body: bytes) -> Iterator[bytes]:
    """Yields a truncated body with each possible ending; at most one of these is valid JSON."""
    closing_brackets = bytearray()
    end, is_open = 0, False
    for match in _STRING_OR_BRACKET.finditer(body):
        end, is_open = match.end(), match["end"] == b""
        bracket = body[match.start()]
        if bracket in b"[{":
            closing_brackets.append(bracket + 2)  # in ASCII, the closing bracket
        elif bracket in b"]}" and closing_brackets:
            closing_brackets.pop()
    closing_brackets.reverse()
    body = (
        _remove_end(body[:end], _PARTIAL_CHARACTER)
        if is_open
        else _remove_end(body, _PARTIAL_LITERAL)
    )
    for rest in (b'"', b'":0') if is_open else (b"", b"0", b'"":0', b":0"):
        yield body + rest + closing_brackets


def _remove_end(data: bytes, end: re.Pattern[bytes]) -> bytes:
    match = end.search(data, max(0, len(data) - 32))
    return data if match is None else data[: match.start()]

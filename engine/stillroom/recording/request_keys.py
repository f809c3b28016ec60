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

_CONVERSATION = frozenset(("messages", "input", "instructions", "system", "prompt"))
"""The request fields with the conversation, which is recorded unchanged."""
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?P<end>"?)|[\[\]{}]', re.DOTALL)
_CUT_CHARACTER = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\u[0-9a-fA-F]{0,3})?$|[\xc0-\xff][\x80-\xbf]{0,2}$"
)
_CUT_LITERAL = re.compile(rb"[\w.+-]{1,32}$")
"""What the end of a body that was cut may lack the rest of: a character, a number or a name."""
_FIELD = re.compile(rb'"([\w.-]{1,64})"\s*:\s*"((?:[^"\\]++|\\.)*+)', re.DOTALL)


def request_keys(head: RequestHead, body: bytes) -> tuple[str, ...]:
    """Returns the distinct API keys in a request, in all forms in which a reply may repeat them."""
    return tuple(dict.fromkeys((*_keys_in_head(head), *_keys_in_body(body))))


def _keys_in_head(head: RequestHead) -> Iterator[str]:
    for name, value in head.headers.items():
        if is_key_name(name):
            yield from secret_forms(value)
    yield from keys_in_url(head.target)


def _keys_in_body(body: bytes) -> Iterator[str]:
    """Yields the keys in the fields of a body outside the conversation, also if the body is cut."""
    for whole in chain([body], _completions(body)):
        try:
            fields = msgspec.json.decode(whole, type=dict[str, msgspec.Raw])
            others = [
                (k, msgspec.json.decode(v)) for k, v in fields.items() if k not in _CONVERSATION
            ]
            break
        except (ValueError, RecursionError):
            continue
    else:
        others = [(k.decode(), v.decode(errors="replace")) for k, v in _FIELD.findall(body)]
    yield from keys_in_fields(others)


def _completions(body: bytes) -> Iterator[bytes]:
    """Yields JSON texts that begin with a body which was cut; at most one of them is valid."""
    ends = bytearray()
    end, is_open = 0, False
    for match in _STRUCTURE.finditer(body):
        end, is_open = match.end(), match["end"] == b""
        mark = body[match.start()]
        if mark in b"[{":
            ends.append(mark + 2)  # in ASCII, the closing bracket
        elif mark in b"]}" and ends:
            ends.pop()
    ends.reverse()
    body = _without_end(body[:end], _CUT_CHARACTER) if is_open else _without_end(body, _CUT_LITERAL)
    for rest in (b'"', b'":0') if is_open else (b"", b"0", b'"":0', b":0"):
        yield body + rest + ends


def _without_end(data: bytes, end: re.Pattern[bytes]) -> bytes:
    match = end.search(data, max(0, len(data) - 32))
    return data if match is None else data[: match.start()]

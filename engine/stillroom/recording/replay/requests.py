"""What makes two requests the same: their JSON, but for its order and fields of the moment."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from stillroom.files import canonical_json
from stillroom.recording.records import CallKind

_VOLATILE = frozenset(
    (
        "user",
        "metadata",
        "client_metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
)
"""Fields that name the caller or the moment, and change no answer."""
_DEPLOYMENT = re.compile(r"/deployments/([^/]+)/")
_DIGEST_BYTES = 16
_MOST_SHOWN = 120
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A request as it is looked up."""

    kind: CallKind
    digest: bytes
    """The hash of all that counts."""
    rest: bytes
    """The hash of all that counts beside the messages."""
    messages: tuple[bytes, ...]
    """The hash of each message."""


def request_key(kind: CallKind, path: str, data: bytes) -> RequestKey:
    """Returns the key of a request. What is no JSON object is the same only byte for byte."""
    deployment = _DEPLOYMENT.search(path)
    place = [kind, deployment[1] if deployment else ""]
    body = decoded_body(data)
    if body is None:
        return RequestKey(kind, _digest([*place, data.hex()]), b"", ())
    counted = {name: value for name, value in body.items() if name not in _VOLATILE}
    given = counted.get(_list_name(kind))
    messages = cast("list[Any]", given) if isinstance(given, list) else [given]
    rest = {name: value for name, value in counted.items() if name != _list_name(kind)}
    return RequestKey(
        kind, _digest([*place, counted]), _digest([*place, rest]), tuple(map(_digest, messages))
    )


def decoded_body(data: bytes) -> dict[str, Any] | None:
    """Returns the JSON object that a request's content is, or None."""
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def _list_name(kind: CallKind) -> str:
    return "input" if kind == "responses" else "messages"


def _digest(value: Any) -> bytes:
    return hashlib.sha256(canonical_json(value)).digest()[:_DIGEST_BYTES]


def first_difference(given: bytes, recorded: bytes) -> str:
    """Returns where two requests differ first and what stands there in each, in one line."""
    ours, others = decoded_body(given), decoded_body(recorded)
    if ours is None or others is None:
        return "their bytes"
    ours, others = (
        {k: v for k, v in body.items() if k not in _VOLATILE} for body in (ours, others)
    )
    found = _difference(ours, others, "")
    if found is None:
        return "the deployment in the path"
    place, here, there = found
    return f"{place.lstrip('.')}: {_shown(here)} here, {_shown(there)} recorded"


def _difference(here: Any, there: Any, place: str) -> tuple[str, Any, Any] | None:
    if isinstance(here, dict) and isinstance(there, dict):
        names = dict.fromkeys([*cast("dict[str, Any]", here), *cast("dict[str, Any]", there)])
        pairs = [
            (f"{place}.{name}", here.get(name, _ABSENT), there.get(name, _ABSENT)) for name in names
        ]
    elif isinstance(here, list) and isinstance(there, list):
        ours, others = cast("list[Any]", here), cast("list[Any]", there)
        most = max(len(ours), len(others))
        ours, others = ([*items, *[_ABSENT] * (most - len(items))] for items in (ours, others))
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, others, strict=True))]
    else:
        return None if here == there and type(here) is type(there) else (place, here, there)
    found = (_difference(a, b, inner) for inner, a, b in pairs)
    return next((one for one in found if one is not None), None)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"

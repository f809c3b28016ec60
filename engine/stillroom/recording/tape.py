"""Looks up recorded calls by their requests.

Two requests match if their JSON is equal, ignoring the order of keys and the fields in `_VOLATILE`.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.data.row_files import RowReader, read_row_lines
from stillroom.errors import DataError, InputError
from stillroom.files import canonical_json
from stillroom.recording.journal import journals_in
from stillroom.recording.records import CallKind, RecordedCall, RecordedReply, decode_call
from stillroom.secrecy.key_fields import without_signatures

_REPLAYABLE_ENDS = ("whole", "upstream_left")
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
"""Fields that name the caller or a cache and do not affect the answer."""
_DEPLOYMENT = re.compile(r"/deployments/([^/]+)/")
_DIGEST_BYTES = 16
_MAX_SHOWN = 120
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The hashes by which a request is looked up."""

    kind: CallKind
    digest: bytes
    """The hash of all compared fields."""
    other_fields: bytes
    """The hash of the compared fields without the messages."""
    messages: tuple[bytes, ...]
    """The hash of each message."""


def request_key(kind: CallKind, path: str, data: bytes) -> RequestKey:
    """Returns the key of a request. A body that is not a JSON object is compared byte for byte."""
    deployment = _DEPLOYMENT.search(path)
    endpoint = [kind, deployment[1] if deployment else ""]
    body = parse_body(data)
    if body is None:
        return RequestKey(kind, _digest([*endpoint, data.hex()]), b"", ())
    compared = {name: value for name, value in body.items() if name not in _VOLATILE}
    value = compared.get(_messages_field(kind))
    messages = cast("list[Any]", value) if isinstance(value, list) else [value]
    other_fields = {k: v for k, v in compared.items() if k != _messages_field(kind)}
    return RequestKey(
        kind,
        _digest([*endpoint, compared]),
        _digest([*endpoint, other_fields]),
        tuple(map(_digest, messages)),
    )


def parse_body(data: bytes) -> dict[str, Any] | None:
    """Returns a request's content as a JSON object; None if it is not one."""
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def _messages_field(kind: CallKind) -> str:
    """Returns the name of the request field with the messages."""
    return "input" if kind == "responses" else "messages"


def _digest(value: Any) -> bytes:
    return hashlib.sha256(canonical_json(value)).digest()[:_DIGEST_BYTES]


def first_difference(request: bytes, recorded: bytes) -> str:
    """Describes in one line the first field in which two requests differ, with both values."""
    new, old = parse_body(request), parse_body(recorded)
    if new is None or old is None:
        return "the bytes of the body"
    new, old = ({k: v for k, v in body.items() if k not in _VOLATILE} for body in (new, old))
    difference = _difference(new, old, "")
    if difference is None:
        return "the deployment in the path"
    path, new_value, old_value = difference
    return f"{path.lstrip('.')}: {_abbreviate(new_value)} sent, {_abbreviate(old_value)} recorded"


def _difference(new: Any, old: Any, path: str) -> tuple[str, Any, Any] | None:
    """Returns the path of the first difference between two JSON values, and both values."""
    if isinstance(new, dict) and isinstance(old, dict):
        names = dict.fromkeys([*cast("dict[str, Any]", new), *cast("dict[str, Any]", old)])
        pairs = [(f"{path}.{k}", new.get(k, _ABSENT), old.get(k, _ABSENT)) for k in names]
    elif isinstance(new, list) and isinstance(old, list):
        items = zip_longest(cast("list[Any]", new), cast("list[Any]", old), fillvalue=_ABSENT)
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(items)]
    else:
        return None if new == old and type(new) is type(old) else (path, new, old)
    differences = (_difference(a, b, inner) for inner, a, b in pairs)
    return next((each for each in differences if each is not None), None)


def _abbreviate(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """The location of a recorded call in a journal."""

    path: Path
    line: int
    offset: int
    num_bytes: int
    started_at: str
    key: RequestKey

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class ReplayedReply:
    """The recorded reply to a request, and the entry of its call."""

    reply: RecordedReply
    is_complete: bool
    entry: TapeEntry
    number: int
    """How often the request has been answered, including this time."""
    total: int
    """How many calls with this request were recorded."""


class Tape:
    """The recorded calls of journals, given as files or folders.

    Equal requests are answered in the order in which they were recorded. Raises InputError if no
    call can be replayed, and DataError for a line that is not a call.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._entries = defaultdict[bytes, list[TapeEntry]](list)
        self._num_answers = defaultdict[bytes, int](int)
        self._reader = RowReader()
        self.num_left_out = 0
        """The number of calls that cannot be replayed: their reply or record is incomplete."""
        for path in paths:
            for journal in journals_in(path) if path.is_dir() else [path]:
                self._read(journal)
        for entries in self._entries.values():
            entries.sort(key=lambda entry: entry.started_at)
        if not self._entries:
            shown = ", ".join(map(str, paths))
            raise InputError(
                f"no recorded call in {shown} can be replayed",
                "record calls first: stillroom record --upstream …",
            )

    @property
    def num_calls(self) -> int:
        """The number of calls that can be replayed."""
        return sum(map(len, self._entries.values()))

    def _read(self, path: Path) -> None:
        """Adds the calls of a journal that can be replayed."""
        for line in read_row_lines(path):
            try:
                call = decode_call(line.utf8)
            except (ValueError, RecursionError) as error:
                if path.stat().st_size == line.offset + line.num_bytes:
                    # The recorder was killed while it wrote the last line, or is writing it now.
                    self.num_left_out += 1
                    continue
                raise DataError(
                    f"{path}:{line.number} is not a recorded call: {str(error)[:200]}",
                    "give unmodified journals of `stillroom record`",
                ) from error
            contents = [call.request.content, *([call.reply.content] if call.reply else [])]
            is_complete = len(contents) == 2 and all(content.cut is None for content in contents)
            if call.end not in _REPLAYABLE_ENDS or not is_complete:
                self.num_left_out += 1
                continue
            # Earlier versions recorded the signatures of images and files.
            data = without_signatures(call.request.content.data)
            key = request_key(call.kind, call.path, data)
            entry = TapeEntry(path, line.number, line.offset, line.num_bytes, call.started_at, key)
            self._entries[key.digest].append(entry)

    def next_reply(self, key: RequestKey) -> ReplayedReply | None:
        """Returns the next recorded reply to a request; after the last one, that one again.

        Returns None if the request was not recorded.
        """
        entries = self._entries.get(key.digest)
        if entries is None:
            return None
        self._num_answers[key.digest] += 1
        number = self._num_answers[key.digest]
        entry = entries[min(number, len(entries)) - 1]
        call = self._read_call(entry)
        if call.reply is None:
            raise DataError(f"{entry} has changed since the replay started", "restart the replay")
        return ReplayedReply(call.reply, call.end == "whole", entry, number, len(entries))

    def nearest(self, key: RequestKey, data: bytes) -> str | None:
        """Describes the most similar recorded request and its first difference.

        Returns None if no call of the same API was recorded.
        """
        entries = [
            entry for equal in self._entries.values() for entry in equal
            if entry.key.kind == key.kind
        ]  # fmt: skip
        if not entries:
            return None
        best = max(entries, key=lambda entry: _similarity(entry.key, key))
        recorded = without_signatures(self._read_call(best).request.content.data)
        return f"{best}, which differs in {first_difference(data, recorded)}"

    def close(self) -> None:
        """Closes the journals."""
        self._reader.__exit__()

    def _read_call(self, entry: TapeEntry) -> RecordedCall:
        return decode_call(self._reader.read(entry.path, entry.offset, entry.num_bytes))


def _similarity(recorded: RequestKey, key: RequestKey) -> tuple[int, bool, int]:
    """Returns a sort key: more shared first messages are more similar, then equal other fields."""
    pairs = zip(recorded.messages, key.messages, strict=False)
    num_shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    length_difference = abs(len(recorded.messages) - len(key.messages))
    return num_shared, recorded.other_fields == key.other_fields, -length_difference

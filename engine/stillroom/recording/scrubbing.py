"""Removes API keys from recorded contents, including keys that a stream splits across events."""

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from stillroom import bounds
from stillroom.secrecy.redaction import MARK, MAX_COMPARED_BYTES, Redactor

_DELTAS = re.compile(
    rb'"(content|text|arguments|partial_json|delta|thinking|reasoning|reasoning_content|refusal'
    rb'|summary|input|output|code|transcript|name)": ?"((?:[^"\\]++|\\.)*+)"',
    re.DOTALL,
)
"""The fields of stream events that hold deltas of a text."""
_SEVERAL_TEXTS = re.compile(rb'index": ?[1-9]')
"""Matches events of a stream with several interleaved texts, such as the choices of `n: 2`."""
_LINES = re.compile(rb"[^\n]+")
_MAX_REDACTORS = 256
_MAX_KEY_BYTES = bounds.CALL_KEYS.limit
_MIN_PENDING = 512
"""The minimum number of pending bytes to process at once; smaller batches cost more in total."""

Span = tuple[int, int]
TextName = tuple[bytes, tuple[int, ...]]
"""Identifies a text of a stream: the field with its deltas, and the indices of its choice, tool
call or output."""


@functools.lru_cache(maxsize=_MAX_REDACTORS)
def redactor_of(keys: tuple[str, ...]) -> Redactor:
    """Returns a cached redactor of these keys: it is slow to build, and calls share keys."""
    if sum(min(len(key), MAX_COMPARED_BYTES) for key in keys) > _MAX_KEY_BYTES:
        return _WithholdingRedactor()
    return Redactor(keys)


class _WithholdingRedactor(Redactor):
    """Replaces every text, for a call with too many keys to search for in a reasonable time."""

    def __init__(self) -> None:
        # With no secrets at all, `Redactor` would skip the search.
        super().__init__(["every text"])

    def contains_secret(self, data: bytes) -> bool:
        """Returns whether there is anything to withhold."""
        return bool(data)

    def spans(self, data: bytes) -> list[Span]:
        """Returns the start and end of the whole text."""
        return [(0, len(data))] if data else []


class StreamText:
    """Encodes a stream for its record while it arrives, and searches it for API keys.

    Keys are searched for in the stream itself, and in the texts joined from the deltas in its
    events.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._pending: list[bytes] = []
        self._num_pending, self._has_line_end = 0, False
        self._stream_search = KeySearch(redactor)
        self._text_searches = defaultdict[TextName, KeySearch](lambda: KeySearch(redactor))
        self._encoded: list[bytes] = []
        self._is_utf8 = True

    def add(self, data: bytes) -> None:
        """Adds the next bytes of the stream."""
        self._pending.append(data)
        self._num_pending += len(data)
        self._has_line_end = self._has_line_end or b"\n" in data

    def process_pending(self) -> None:
        """Processes the complete lines that have arrived, if there are enough of them."""
        if not self._has_line_end or self._num_pending < _MIN_PENDING:
            return
        data = b"".join(self._pending)
        end = data.rfind(b"\n") + 1
        self._pending = [data[end:]]
        self._num_pending, self._has_line_end = len(data) - end, False
        self._process(data[:end])

    def finish(self) -> bytes | None:
        """Processes the remaining bytes, and returns the whole stream as a JSON string.

        Returns None if the stream contains an API key or is not UTF-8.
        """
        remaining, self._pending = b"".join(self._pending), []
        self._process(remaining)
        if not self._is_utf8 or self._stream_search.has_key or self.texts_with_keys():
            return None
        return b'"%b"' % b"".join(self._encoded)

    def texts_with_keys(self) -> list[TextName]:
        """Returns the names of the texts whose joined deltas contain a key."""
        return [name for name, search in self._text_searches.items() if search.has_key]

    def _process(self, lines: bytes) -> None:
        """Searches complete lines for keys, and encodes them."""
        self._stream_search.add(lines)
        for name, spans in _delta_spans(lines).items():
            self._text_searches[name].add(b"".join([lines[start:end] for start, end in spans]))
        try:
            self._encoded.append(msgspec.json.encode(lines.decode())[1:-1])
        except UnicodeDecodeError:
            self._is_utf8 = False


def _delta_spans(lines: bytes) -> dict[TextName, list[Span]]:
    """Returns the byte spans of the deltas in the lines of a stream, by the text they belong to."""
    deltas = defaultdict[TextName, list[Span]](list)
    if _SEVERAL_TEXTS.search(lines) is None:
        for match in _DELTAS.finditer(lines):
            deltas[match[1], ()].append(match.span(2))
        return deltas
    for line in _LINES.finditer(lines):
        matches = [*_DELTAS.finditer(lines, line.start(), line.end())]
        names = _text_names(line[0]) if matches else []
        if [name for name, _ in names] != [match[1] for match in matches]:
            names = [(match[1], ()) for match in matches]
        for name, match in zip(names, matches, strict=True):
            deltas[name].append(match.span(2))
    return deltas


def _text_names(line: bytes) -> list[TextName]:
    """Returns the name of the text of each delta in an event, in order."""
    try:
        event = msgspec.json.decode(line.partition(b":")[2])
    except (ValueError, RecursionError):
        return []
    names: list[TextName] = []
    pending: list[tuple[str, Any, tuple[int, ...]]] = [("", event, ())]
    while pending:
        name, value, indices = pending.pop()
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            own_indices = [
                v for k, v in fields.items() if k.endswith("index") and isinstance(v, int)
            ]
            inner = (*indices, *own_indices)
            pending += reversed([(k, v, inner) for k, v in fields.items()])
        elif isinstance(value, list):
            pending += reversed([(name, item, indices) for item in cast("list[Any]", value)])
        elif isinstance(value, str) and _DELTAS.fullmatch(b'"%b":""' % name.encode()):
            # Events without an index belong to the same text as those with index 0.
            names.append((name.encode(), indices if any(indices) else ()))
    return names


class KeySearch:
    """Searches for keys in a text that arrives in parts, even if a key is split between them."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._parts: list[bytes] = []
        self._num_new = 0
        self._has_key = False

    def add(self, data: bytes) -> None:
        """Adds the next part."""
        self._parts.append(data)
        self._num_new += len(data)
        # A part is searched together with the preceding bytes in which a key may begin.
        if self._num_new >= self._redactor.reach:
            self._search()

    @property
    def has_key(self) -> bool:
        """Whether the parts so far contain a key."""
        if self._num_new:
            self._search()
        return self._has_key

    def _search(self) -> None:
        data = b"".join(self._parts)
        self._has_key = self._has_key or self._redactor.contains_secret(data)
        self._parts = [data[max(0, len(data) - self._redactor.reach) :]]
        self._num_new = 0


def scrub(data: bytes, redactor: Redactor, stream: StreamText | None = None) -> bytes:
    """Returns a content without API keys; the same object if it contains none.

    For a streamed reply, `stream` is the StreamText that has processed this content.
    """
    data = redactor.redact_bytes(data)
    names = stream.texts_with_keys() if stream is not None else ()
    if not names:
        return data
    deltas = _delta_spans(data)
    cuts = [cut for name in names for cut in _find_cuts(data, deltas.get(name, []), redactor)]
    parts: list[bytes] = []
    position = 0
    for (start, end), mark in sorted(cuts):
        parts += [data[position:start], mark]
        position = end
    return b"".join([*parts, data[position:]])


def _find_cuts(data: bytes, deltas: Sequence[Span], redactor: Redactor) -> list[tuple[Span, bytes]]:
    """Returns the spans of keys within a text's deltas, each with its replacement."""
    text = b"".join([data[start:end] for start, end in deltas])
    cuts: list[tuple[Span, bytes]] = []
    for key_start, key_end in redactor.spans(text):
        offset, mark = 0, MARK.encode()  # the delta's offset in the text
        for start, end in deltas:
            first, last = max(key_start, offset), min(key_end, offset + end - start)
            if first < last:
                cuts.append(((start + first - offset, start + last - offset), mark))
                mark = b""
            offset += end - start
    return cuts

"""Takes keys out of recorded contents, also those that a stream holds in pieces."""

import functools
import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from stillroom.secrecy.redaction import MARK, Redactor

_PIECES = re.compile(
    rb'"(content|text|arguments|partial_json|delta|thinking|reasoning|reasoning_content|refusal'
    rb'|summary|input|output|code|transcript|name)": ?"([^"\\]*(?:\\.[^"\\]*)*)"',
    re.DOTALL,
)
"""The fields in which the events of a stream hold the pieces of texts."""
_MOST_REDACTORS = 256
_WORTH_READING = 512
"""Bytes of a stream that are read at once: less each time costs more in all."""

Span = tuple[int, int]


@functools.lru_cache(maxsize=_MOST_REDACTORS)
def redactor_of(keys: tuple[str, ...]) -> Redactor:
    """Returns what takes these keys out of texts; it is costly to make, and calls share keys."""
    return Redactor(keys)


class StreamText:
    """The text of a stream, which is made ready for its record while the stream still goes on.

    Keys are looked for in the stream as it is, and in the texts whose pieces its events hold.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._unread: list[bytes] = []
        self._num_unread, self._has_line_end = 0, False
        self._whole = KeySearch(redactor)
        self._fields = defaultdict[bytes, KeySearch](lambda: KeySearch(redactor))
        self._encoded: list[bytes] = []
        self._is_utf8 = True

    def add(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._unread.append(data)
        self._num_unread += len(data)
        self._has_line_end = self._has_line_end or b"\n" in data

    def read_on(self) -> None:
        """Reads the lines that have come, if they are worth it: called while nobody waits."""
        if not self._has_line_end or self._num_unread < _WORTH_READING:
            return
        data = b"".join(self._unread)
        end = data.rfind(b"\n") + 1
        self._unread = [data[end:]]
        self._num_unread, self._has_line_end = len(data) - end, False
        self._read(data[:end])

    def encoded(self) -> bytes | None:
        """Returns the ended stream as a JSON string; None if it holds keys or no UTF-8."""
        rest, self._unread = b"".join(self._unread), []
        self._read(rest)
        if not self._is_utf8 or self._whole.has_found or self.fields_with_keys():
            return None
        return b'"%b"' % b"".join(self._encoded)

    def fields_with_keys(self) -> list[bytes]:
        """Returns the names of the fields whose pieces put together hold a key."""
        return [name for name, search in self._fields.items() if search.has_found]

    def _read(self, lines: bytes) -> None:
        self._whole.add(lines)
        pieces = defaultdict[bytes, list[bytes]](list)
        for name, piece in _PIECES.findall(lines):
            pieces[name].append(piece)
        for name, parts in pieces.items():
            self._fields[name].add(b"".join(parts))
        try:
            self._encoded.append(msgspec.json.encode(lines.decode())[1:-1])
        except UnicodeDecodeError:
            self._is_utf8 = False


class KeySearch:
    """Looks for keys in a text that comes in parts, between which a key may be cut in two."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._parts: list[bytes] = []
        self._num_new = 0
        self._has_found = False

    def add(self, data: bytes) -> None:
        """Takes the next part."""
        self._parts.append(data)
        self._num_new += len(data)
        # A part is looked into together with what a key may have begun in before it.
        if self._num_new >= self._redactor.reach:
            self._look()

    @property
    def has_found(self) -> bool:
        """Whether the parts so far hold a key."""
        if self._num_new:
            self._look()
        return self._has_found

    def _look(self) -> None:
        data = b"".join(self._parts)
        self._has_found = self._has_found or self._redactor.is_in(data)
        self._parts = [data[max(0, len(data) - self._redactor.reach) :]]
        self._num_new = 0


def scrubbed(data: bytes, redactor: Redactor, stream: StreamText | None = None) -> bytes:
    """Returns a content without keys; it is the same object if there were none.

    `stream` has read the content, if it is one.
    """
    data = redactor.data(data)
    names = stream.fields_with_keys() if stream is not None else ()
    if not names:
        return data
    pieces = defaultdict[bytes, list[Span]](list)
    for found in _PIECES.finditer(data):
        pieces[found[1]].append(found.span(2))
    cuts = [cut for name in names for cut in _cuts(data, pieces[name], redactor)]
    parts: list[bytes] = []
    place = 0
    for (start, end), mark in sorted(cuts):
        parts += [data[place:start], mark]
        place = end
    return b"".join([*parts, data[place:]])


def _cuts(data: bytes, pieces: Sequence[Span], redactor: Redactor) -> list[tuple[Span, bytes]]:
    """Returns which bytes of a text's pieces belong to keys, and what stands in their place."""
    text = b"".join([data[start:end] for start, end in pieces])
    found = redactor.spans(text)
    cuts: list[tuple[Span, bytes]] = []
    for key_start, key_end in found:
        place, mark = 0, MARK.encode()
        for start, end in pieces:
            first, last = max(key_start, place), min(key_end, place + end - start)
            if first < last:
                cuts.append(((start + first - place, start + last - place), mark))
                mark = b""
            place += end - start
    return cuts

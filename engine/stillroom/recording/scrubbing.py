"""Takes keys out of recorded contents, also those that a stream holds in pieces."""

import functools
import re
from collections import defaultdict
from collections.abc import Sequence

from stillroom.secrecy.redaction import MARK, Redactor

_PIECES = re.compile(
    rb'"(content|text|arguments|partial_json|delta|thinking|reasoning|reasoning_content|refusal'
    rb'|summary|input|output|code|transcript|name)": ?"([^"\\]*(?:\\.[^"\\]*)*)"',
    re.DOTALL,
)
"""The fields in which the events of a stream hold the pieces of texts."""
_MOST_REDACTORS = 256

Span = tuple[int, int]


@functools.lru_cache(maxsize=_MOST_REDACTORS)
def redactor_of(keys: tuple[str, ...]) -> Redactor:
    """Returns what takes these keys out of texts; it is costly to make, and calls share keys."""
    return Redactor(keys)


class StreamTexts:
    """The texts that the events of a stream hold in pieces, collected as the events come."""

    def __init__(self) -> None:
        self._pieces = defaultdict[bytes, list[bytes]](list)
        self._rest: list[bytes] = []
        """The beginning of a line whose end has not come."""

    def add(self, data: bytes) -> None:
        """Collects the pieces in the next bytes of the stream."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest.append(data)
            return
        lines = b"".join([*self._rest, data[:end]])
        self._rest = [data[end:]]
        for name, piece in _PIECES.findall(lines):
            self._pieces[name].append(piece)

    def fields_with_keys(self, redactor: Redactor) -> set[bytes]:
        """Returns the names of the fields whose pieces put together hold a key."""
        return {name for name, parts in self._pieces.items() if redactor.spans(b"".join(parts))}


def scrubbed(data: bytes, redactor: Redactor, texts: StreamTexts | None = None) -> bytes:
    """Returns a content without keys; it is the same object if there were none.

    `texts` are those of a stream.
    """
    data = redactor.data(data)
    names = texts.fields_with_keys(redactor) if texts is not None else ()
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

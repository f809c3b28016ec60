"""Reads the JSON rows of source files, each with its location; refuses unreadable rows."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.data.checks import Problem, decode_row
from stillroom.data.row_files import MAX_ROW_BYTES, TOO_LONG, decode_line, read_row_lines
from stillroom.errors import InputError
from stillroom.importing.records import Location, RefusedRow, SourceRow
from stillroom.lines import BOM
from stillroom.secrecy.readable import check_readable

Row = dict[str, Any]
_BLOCK = 1 << 20
_BLANKS = b" \t\r\n"
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)
"""A complete string, a bracket or a comma; or the quote that opens an incomplete string."""
_CLOSING = {b"{": b"}", b"[": b"]"}
_MAX_HEAD_ROWS = 20
_HEAD = 64 << 10
_LONG_HEAD = 1 << 20


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One JSON object of a source."""

    location: Location
    data: Row


class UnreadableRowError(Exception):
    """Raised for a row that has no conversation, or whose conversation cannot be read."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def convert_rows(
    rows: Iterable[JsonRow | RefusedRow], convert: Callable[[JsonRow], Iterable[SourceRow]]
) -> Iterator[SourceRow]:
    """Yields what `convert` yields for each row.

    A row for which it raises UnreadableRowError is yielded as a RefusedRow only.
    """
    for row in rows:
        yield from [row] if isinstance(row, RefusedRow) else _convert_row(row, convert)


def _convert_row(
    row: JsonRow, convert: Callable[[JsonRow], Iterable[SourceRow]]
) -> Sequence[SourceRow]:
    try:
        return list(convert(row))
    except UnreadableRowError as error:
        return [RefusedRow(row.location, error.reason, error.detail)]
    except RecursionError:
        return [RefusedRow(row.location, "nested too deeply")]


def listed_rows(row: JsonRow, *fields: str, part: str = "row") -> Iterator[JsonRow]:
    """Yields the elements of the list in an API response or similar row, or else the row itself.

    The list is the first non-empty one in `fields`. An element's location has the part
    `{part} {number}`.
    """
    lists = (row.data[name] for name in fields if isinstance(row.data.get(name), list))
    listed = next((cast("list[Any]", items) for items in lists if items), None)
    if listed is None:
        yield row
        return
    for number, item in enumerate(listed, start=1):
        location = Location(row.location.path, row.location.line, f"{part} {number}".lstrip())
        yield JsonRow(location, cast("Row", item) if isinstance(item, dict) else {})


def read_json_rows(*paths: Path) -> Iterator[JsonRow | RefusedRow]:
    """Yields the objects of JSON Lines files, JSON arrays and single JSON documents.

    Only one row is in memory at a time. Raises InputError for a file that must not be read.
    """
    for path in paths:
        check_readable(path)
        if is_array_file(path):
            yield from _element_rows(path)
        else:
            for line in read_row_lines(path):
                yield _row_of(Location(path, line.number), decode_line(line))


SOURCE_LINK = ".stillroom-source"
"""The link next to a decompressed copy that leads to the folder of its compressed file."""


def source_folder(path: Path) -> Path:
    """Returns the folder of a source; of a decompressed copy, the folder of its compressed file."""
    link = path.parent / SOURCE_LINK
    return link.readlink() if link.is_symlink() else path.parent


def read_document(path: Path) -> Row:
    """Returns the JSON object in a small file next to a source; empty if it cannot be read."""
    try:
        if path.stat().st_size > MAX_ROW_BYTES:
            return {}
        check_readable(path)
        document = decode_row(path.read_bytes())
    except (OSError, InputError):
        return {}
    return {} if isinstance(document, Problem) else document


def read_field_rows(path: Path, field: str) -> Iterator[JsonRow | RefusedRow]:
    """Yields the elements of the list in a field of a JSON document, one at a time.

    Raises InputError for a file that must not be read.
    """
    check_readable(path)
    yield from _element_rows(path, field)


def _element_rows(path: Path, field: str | None = None) -> Iterator[JsonRow | RefusedRow]:
    """Yields the objects of a file's JSON array, or of the array in a field of its object."""
    too_long = Problem("", TOO_LONG, "remove it, or split it into several rows")
    scan, number = _ArrayScan(field), 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            for data in scan.elements_in(block):
                number += 1
                yield _row_of(
                    Location(path, number), too_long if data is None else decode_row(data)
                )
    for data in scan.trailing_element():
        row = _row_of(Location(path, number + 1), too_long if data is None else decode_row(data))
        if isinstance(row, JsonRow) or not scan.is_open:
            number += 1
            yield row
    if scan.is_open:
        yield RefusedRow(
            Location(path, number + 1),
            "the file is cut off here",
            f"the JSON is not closed; the {number} elements before this are complete",
        )


def _row_of(location: Location, row: Row | Problem) -> JsonRow | RefusedRow:
    if isinstance(row, Problem):
        return RefusedRow(location, "not a JSON object", f"the row {row.message}; {row.fix}")
    return JsonRow(location, row)


def is_array_file(path: Path) -> bool:
    """Returns whether a file begins as a JSON array, whose elements are its rows."""
    with path.open("rb") as stream:
        return stream.read(4096).removeprefix(BOM).lstrip(_BLANKS).startswith(b"[")


class _ArrayScan:
    """Splits an array into its elements, block by block, with one element in memory at a time."""

    def __init__(self, field: str | None) -> None:
        """With `field`, the array is in this field of an object; with None, it is the document."""
        self._data = b""
        self._offset = self._begin = self._depth = 0
        """The offset of the next token, that of the current element, and the number of open
        brackets."""
        self._is_truncated = False
        """Whether a part of the current element was dropped, because the element is too long."""
        self._field = None if field is None else b'"%s"' % field.encode()
        self._depth_inside = 1 if field is None else 2
        self._is_inside = False
        """Whether the next token is in the array."""
        self._key = b""
        """The last string at the depth of `field`, which may be its name."""

    def elements_in(self, block: bytes) -> Iterator[bytes | None]:
        """Adds a block, and yields the elements that end in it; None for one that is too long."""
        self._data += block
        while (token := _TOKEN.search(self._data, self._offset)) is not None:
            kind = token[0]
            if kind == b'"':
                self._offset = token.start()
                break
            self._offset = token.end()
            yield from self._process_token(kind, token.start(), token.end())
        else:
            self._offset = len(self._data)
        self._drop_read_data()

    def _process_token(self, kind: bytes, start: int, end: int) -> Iterator[bytes | None]:
        """Processes a token; yields the element that it ends, if any."""
        if kind in _CLOSING:
            self._depth += 1
            if self._depth == self._depth_inside and self._field in (None, self._key):
                self._is_inside, self._begin = True, end
        elif kind[:1] == b'"':
            if self._depth == self._depth_inside - 1:
                self._key = kind
        elif kind == b",":
            if self._is_inside and self._depth == self._depth_inside:
                yield from self._element(start, end)
        else:
            self._depth -= 1
            if self._is_inside and self._depth == self._depth_inside - 1:
                yield from self._element(start, end)
                self._is_inside = False
        if not self._is_inside and self._field is not None:
            self._begin = end

    @property
    def is_open(self) -> bool:
        """Whether a bracket of the text so far is not closed yet."""
        return self._depth > 0

    def trailing_element(self) -> Iterator[bytes | None]:
        """Yields what follows the last complete element, if anything does."""
        yield from self._element(len(self._data), len(self._data))

    def _element(self, end: int, next_begin: int) -> Iterator[bytes | None]:
        element = self._data[self._begin : end].strip(_BLANKS)
        if self._is_truncated or element:
            yield None if self._is_truncated else element
        self._begin, self._is_truncated = next_begin, False

    def _drop_read_data(self) -> None:
        """Frees the text before the current element, and an element that is too long."""
        if len(self._data) - self._begin > MAX_ROW_BYTES:
            self._is_truncated, self._begin = True, self._offset
            if len(self._data) - self._offset > MAX_ROW_BYTES:  # a string without an end
                self._data, self._offset, self._begin = b'"', 0, 0
        self._data = self._data[self._begin :]
        self._offset -= self._begin
        self._begin = 0


def read_head(path: Path) -> bytes:
    """Returns the first 64 kB of a file, or the first MB if its first row is longer."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
        first_line = head.removeprefix(BOM).lstrip(_BLANKS).split(b"\n", 1)[0]
        if (
            len(head) == _HEAD
            and first_line.startswith((b"{", b"["))
            and not _parse_json(first_line)
        ):
            head += stream.read(_LONG_HEAD)
    return head


@functools.lru_cache(maxsize=4)
def head_rows(head: bytes) -> tuple[Row, ...]:
    """Returns the JSON objects in the first bytes of a file, without lines that are not objects.

    Fields of the last object may be missing. The rows are cached for all format detectors, so
    none of them may change a row.
    """
    head = head.removeprefix(BOM).lstrip(_BLANKS)
    if not head.startswith(b"["):
        lines = head.split(b"\n")[:_MAX_HEAD_ROWS]
        if rows := tuple(_objects(_parse_json(line) for line in lines if line.startswith(b"{"))):
            return rows
    document = _parse_json(head)
    document = _parse_json(_complete_json(head)) if document is None else document
    elements = cast("list[Any]", document) if isinstance(document, list) else [document]
    return tuple(_objects(elements[:_MAX_HEAD_ROWS]))


def detect_by_row(matches: Callable[[Row], bool]) -> Callable[[Path, bytes], bool]:
    """Returns a format detector that accepts a file if `matches` is true for a row at its start."""
    return lambda _path, head: any(matches(row) for row in head_rows(head))


def _objects(values: Iterable[Any]) -> Iterator[Row]:
    return (cast("Row", value) for value in values if isinstance(value, dict) and value)


def _parse_json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _complete_json(data: bytes) -> bytes:
    """Completes a truncated JSON text: drops the last, incomplete value and closes brackets."""
    opened: list[bytes] = []
    end = 0
    for token in _TOKEN.finditer(data):
        kind = token[0]
        if kind == b'"':
            break
        if kind in _CLOSING:
            opened.append(_CLOSING[kind])
            end = token.end()
        elif kind == b",":
            end = token.start()
        elif opened and kind == opened[-1]:
            opened.pop()
            end = token.end()
        if end and not opened:
            break
    return data[:end] + b"".join(reversed(opened))


def make_row_reader(
    convert: Callable[[JsonRow], Iterable[SourceRow]],
) -> Callable[[Sequence[Path]], Iterator[SourceRow]]:
    """Returns a format's reader that converts JSON rows one by one."""
    return lambda paths: convert_rows(read_json_rows(*paths), convert)

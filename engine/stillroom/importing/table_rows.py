"""Reads the rows of tables: CSV and TSV files with a header, and Parquet files."""

import csv
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from stillroom.data.row_files import MAX_ROW_BYTES, TOO_LONG
from stillroom.errors import DataError, missing_extra
from stillroom.importing.json_rows import JsonRow, Row, head_rows, read_json_rows
from stillroom.importing.records import Location, RefusedRow
from stillroom.lines import BOM
from stillroom.secrecy.readable import check_readable

PARQUET_MARK = b"PAR1"
"""The first and last bytes of a Parquet file."""
_BATCH = 256
_FOOTER_BYTES = 256 << 10
_MAX_HEAD_ROWS = 5


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its column names, and its rows as objects with these names."""

    columns: Sequence[str]
    rows: Iterator[JsonRow | RefusedRow]


def is_csv(path: Path, head: bytes) -> bool:
    """Returns whether a file's name and first bytes are those of a CSV or TSV table."""
    return path.suffix.lower() in (".csv", ".tsv") and not head.startswith(PARQUET_MARK)


def read_any_rows(*paths: Path) -> Iterator[JsonRow | RefusedRow]:
    """Yields the rows of CSV, TSV, Parquet and JSON files.

    Raises MissingExtraError for Parquet without pyarrow, DataError for a corrupt Parquet file, and
    InputError for a file that must not be read.
    """
    for path in paths:
        check_readable(path)
        with path.open("rb") as stream:
            head = stream.read(len(PARQUET_MARK))
        if head == PARQUET_MARK:
            yield from parquet_table(path).rows
        elif is_csv(path, head):
            with csv_table(path) as table:
                yield from table.rows
        else:
            yield from read_json_rows(path)


@contextmanager
def csv_table(path: Path) -> Generator[Table]:
    """Opens a CSV or TSV file. A row with several lines has the location of its last line."""
    check_readable(path)
    with path.open("rb") as stream:
        lines = _TextLines(stream)
        csv.field_size_limit(MAX_ROW_BYTES)
        rows = csv.reader(lines, delimiter=_delimiter(path, stream))
        header = [name.strip() for name in next(rows, [])]
        yield Table(header, _csv_rows(path, header, rows, lines))


def _csv_rows(
    path: Path, header: list[str], rows: Iterator[list[str]], lines: "_TextLines"
) -> Iterator[JsonRow | RefusedRow]:
    """Yields the rows after the header of a CSV file; refuses malformed ones."""
    while True:
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield RefusedRow(Location(path, lines.number), "not a CSV row", str(error))
            continue
        location = Location(path, lines.number)
        if len(fields) != len(header):
            detail = f"expected {len(header)} fields as in the header, got {len(fields)}"
            if fields:
                yield RefusedRow(location, "the fields do not match the header", detail)
        elif any("\ud800" <= character <= "\udfff" for field in fields for character in field):
            yield RefusedRow(location, "not UTF-8 text", "save the file as UTF-8")
        else:
            yield JsonRow(location, dict(zip(header, fields, strict=True)))


def detect_by_item(matches: Callable[[Row], bool], *fields: str) -> Callable[[Path, bytes], bool]:
    """Returns a format detector like `detect_by_row`, but also for CSV files and for lists.

    If a row has a list in one of `fields`, `matches` is called with the list's elements instead.
    """

    def is_recognised(path: Path, head: bytes) -> bool:
        rows = (*head_rows(head), *csv_head(path, head))
        lists = (next((row[name] for name in fields if row.get(name)), [row]) for row in rows)
        return any(
            matches(cast("Row", item))
            for items in lists
            if isinstance(items, list)
            for item in cast("list[Any]", items)
            if isinstance(item, dict)
        )

    return is_recognised


def csv_head(path: Path, head: bytes) -> list[Row]:
    """Returns the rows in the first bytes of a CSV table; empty for any other file.

    If the last row is cut off, its missing values are "?".
    """
    if not is_csv(path, head):
        return []
    lines = head.removeprefix(BOM).decode(errors="replace").splitlines(keepends=True)
    header = lines[0] if lines else ""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t|", key=header.count)
    rows: list[Row] = []
    try:
        for row in csv.DictReader(lines, delimiter=delimiter):
            # Values without a column have the name None.
            fields = {name: value for name, value in row.items() if isinstance(name, str)}
            rows.append({name: "?" if value is None else value for name, value in fields.items()})
            if len(rows) == _MAX_HEAD_ROWS:
                break
    except csv.Error:
        return rows
    return rows


def parquet_footer(path: Path, head: bytes) -> bytes:
    """Returns the last bytes of a Parquet file, which have the column names; empty for others."""
    if not head.startswith(PARQUET_MARK):
        return b""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _FOOTER_BYTES))
        return stream.read()


def parquet_table(path: Path) -> Table:
    """Opens a Parquet file; its rows are read in small batches.

    Raises MissingExtraError without pyarrow, and DataError if the file is corrupt.
    """
    check_readable(path)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("traces", "reading parquet") from error

    # pyarrow raises OSError for some damage, and ValueError for strings that are not UTF-8.
    parquet_errors = (pyarrow.ArrowException, OSError, ValueError)
    try:
        table: Any = parquet.ParquetFile(path)
    except parquet_errors as error:
        raise _corrupt_error(path, error) from error

    def rows() -> Iterator[JsonRow | RefusedRow]:
        number = 0
        try:
            for batch in table.iter_batches(batch_size=_BATCH):
                for data in batch.to_pylist(maps_as_pydicts="lossy"):
                    number += 1
                    yield JsonRow(Location(path, number), data)
        except parquet_errors as error:
            raise _corrupt_error(path, error) from error

    return Table(list(table.schema_arrow.names), rows())


def _corrupt_error(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a valid Parquet file: {error}", "export or download it again")


def _delimiter(path: Path, stream: BinaryIO) -> str:
    """Returns a tab for .tsv files, else the most frequent delimiter in the header."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    header = stream.readline(1 << 16).decode(errors="replace")
    stream.seek(0)
    return max(",;\t|", key=header.count)


class _TextLines:
    """Iterates over the lines of a text file and counts them; invalid UTF-8 becomes surrogates.

    A line that is too long is skipped, and raises csv.Error.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.number = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(MAX_ROW_BYTES)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = self._stream.readline(MAX_ROW_BYTES)
            raise csv.Error(f"the line {TOO_LONG}")
        return line.removeprefix(BOM if self.number == 1 else b"").decode(errors="surrogateescape")

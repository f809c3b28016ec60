"""Reads tables: CSV and TSV, parquet, and JSON rows of a question and its answer."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from stillroom.data.row_files import MAX_ROW_BYTES, TOO_LONG
from stillroom.errors import DataError, missing_extra
from stillroom.importing.formats.datasets.columns import (
    ChosenColumns,
    choose_columns,
    convert_table_row,
    is_pair_row,
)
from stillroom.importing.json_rows import (
    JsonRow,
    UnreadableRowError,
    head_rows,
    read_json_rows,
)
from stillroom.importing.records import Place, Refusal, SourceRow, TraceFormat
from stillroom.lines import BOM
from stillroom.secrecy.readable import check_readable

Columns = Mapping[str, str]
_BATCH = 256
_PARQUET = b"PAR1"


def read_csv(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields the rows of CSV files, which have a header. A place's line is the row's last one.

    Raises InputError or DataError if the header lacks the columns.
    """
    for path in paths:
        check_readable(path)
        with path.open("rb") as stream:
            yield from _csv_rows(path, stream, columns or {})


def _csv_rows(path: Path, stream: BinaryIO, columns: Columns) -> Iterator[SourceRow]:
    lines = _TextLines(stream)
    csv.field_size_limit(MAX_ROW_BYTES)
    rows = csv.reader(lines, delimiter=_delimiter(path, stream))
    header = next(rows, [])
    chosen = choose_columns(path, header, columns)
    while True:
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Refusal(Place(path, lines.number), "not a row of CSV", str(error))
            continue
        place = Place(path, lines.number)
        if len(fields) != len(header):
            detail = f"it has {len(fields)} fields, and the header has {len(header)}"
            if fields:
                yield Refusal(place, "another number of fields than the header", detail)
        elif any("\ud800" <= character <= "\udfff" for field in fields for character in field):
            yield Refusal(place, "not UTF-8 text", "save the file as UTF-8")
        else:
            yield from _converted(JsonRow(place, dict(zip(header, fields, strict=True))), chosen)


def _delimiter(path: Path, stream: BinaryIO) -> str:
    """Returns the delimiter that the header has most; a .tsv file has tabs."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    header = stream.readline(1 << 16).decode(errors="replace")
    stream.seek(0)
    return max(",;\t|", key=header.count)


class _TextLines:
    """The lines of a text file with their number; bytes that are not UTF-8 become half characters.

    A line that is too long to be held is skipped, and reading it raises csv.Error.
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


def _converted(row: JsonRow, columns: ChosenColumns) -> Iterable[SourceRow]:
    try:
        return list(convert_table_row(row, columns))
    except UnreadableRowError as error:
        return [Refusal(row.place, error.reason, error.detail)]


def read_parquet(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields the rows of parquet files, some hundred at a time.

    Raises MissingExtraError without pyarrow; InputError or DataError if the columns are missing or
    the file is broken.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("traces", "reading parquet") from error
    for path in paths:
        check_readable(path)
        try:
            table: Any = parquet.ParquetFile(path)
            chosen = choose_columns(path, list(table.schema_arrow.names), columns or {})
            number = 0
            for batch in table.iter_batches(batch_size=_BATCH):
                for data in batch.to_pylist():
                    number += 1
                    yield from _converted(JsonRow(Place(path, number), data), chosen)
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{path} is no readable parquet file: {error}", "export it again"
            ) from error


def read_pairs(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields JSON rows whose fields are the columns; each row may have others."""
    for path in paths:
        for row in read_json_rows(path):
            if isinstance(row, Refusal):
                yield row
                continue
            try:
                chosen = choose_columns(path, list(row.data), columns or {})
            except DataError as error:
                yield Refusal(row.place, "no field holds the conversation", error.fix)
            else:
                yield from _converted(row, chosen)


def _is_csv(path: Path, head: bytes) -> bool:
    return path.suffix.lower() in (".csv", ".tsv") and not head.startswith(_PARQUET)


def _is_parquet(path: Path, head: bytes) -> bool:
    return head.startswith(_PARQUET)


def _are_pairs(path: Path, head: bytes) -> bool:
    return not _is_csv(path, head) and any(is_pair_row(row) for row in head_rows(head))


CSV = TraceFormat("csv", "CSV and TSV tables", _is_csv, read_csv, read_csv)
PARQUET = TraceFormat("parquet", "Parquet tables", _is_parquet, read_parquet, read_parquet)
PAIRS = TraceFormat(
    "pairs", "JSON rows of a question and its answer", _are_pairs, read_pairs, read_pairs
)

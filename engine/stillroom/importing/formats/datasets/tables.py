"""Reads tables: CSV and TSV, parquet, and JSON rows of a question and its answer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from stillroom.errors import DataError
from stillroom.importing.formats.datasets.columns import (
    ChosenColumns,
    choose_columns,
    convert_table_row,
    is_pair_row,
)
from stillroom.importing.formats.datasets.judgements import (
    JudgementColumns,
    judgement_columns,
    judgements,
)
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    read_json_rows,
)
from stillroom.importing.records import Place, Refusal, SourceRow, TraceFormat
from stillroom.importing.table_rows import PARQUET_MARK, Table, csv_table, is_csv, parquet_table

Columns = Mapping[str, str]
NO_COLUMN = "no column holds the conversation"


def read_csv(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields the rows of CSV files, which have a header. A place's line is the row's last one.

    A table of unknown columns is refused as one row. Raises InputError or DataError if the header
    lacks the given columns.
    """
    for path in paths:
        with csv_table(path) as table:
            yield from _table_rows(path, table, columns or {})


def read_parquet(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields the rows of parquet files, some at a time.

    A table of unknown columns is refused as one row. Raises MissingExtraError without pyarrow;
    InputError or DataError if the given columns are missing or the file is broken.
    """
    for path in paths:
        yield from _table_rows(path, parquet_table(path), columns or {})


def _table_rows(path: Path, table: Table, columns: Columns) -> Iterator[SourceRow]:
    judging = judgement_columns(table.columns, columns)
    try:
        if columns and judging is not None:
            yield from _judged(table.rows, judging)
            return
        chosen = choose_columns(path, table.columns, columns)
    except DataError as error:
        if judging is not None:
            yield from _judged(table.rows, judging)
            return
        if columns:  # what was chosen is wrong for all tables
            raise
        detail = f"{error.fix}; it has {', '.join(map(repr, table.columns))}"
        yield Refusal(Place(path, 1), NO_COLUMN, detail)
        return
    for row in table.rows:
        if isinstance(row, Refusal):
            yield row
        else:
            yield from _converted(row, chosen)


def _judged(rows: Iterable[JsonRow | Refusal], columns: JudgementColumns) -> Iterator[SourceRow]:
    for row in rows:
        if isinstance(row, Refusal):
            yield row
        else:
            yield from judgements(row, columns)


def _converted(row: JsonRow, columns: ChosenColumns) -> Iterable[SourceRow]:
    try:
        return list(convert_table_row(row, columns))
    except UnreadableRowError as error:
        return [Refusal(row.place, error.reason, error.detail)]


def read_pairs(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields JSON rows whose fields are the columns; each row may have others."""
    for path in paths:
        for row in read_json_rows(path):
            if isinstance(row, Refusal):
                yield row
                continue
            judging = judgement_columns(list(row.data), columns) if columns else None
            if judging is not None:
                yield from judgements(row, judging)
                continue
            try:
                chosen = choose_columns(path, list(row.data), columns or {})
            except DataError as error:
                yield Refusal(row.place, "no field holds the conversation", error.fix)
            else:
                yield from _converted(row, chosen)


def _is_parquet(path: Path, head: bytes) -> bool:
    return head.startswith(PARQUET_MARK)


def _are_pairs(path: Path, head: bytes) -> bool:
    if is_csv(path, head):
        return False
    return any(is_pair_row(row) or _are_messages_as_text(row) for row in head_rows(head))


def _are_messages_as_text(row: Row) -> bool:
    """Returns whether a row holds its conversation as JSON text, as exports of tables do."""
    text = row.get("messages", row.get("conversations"))
    return isinstance(text, str) and text.lstrip().startswith("[{")


CSV = TraceFormat("csv", "CSV and TSV tables", is_csv, read_csv, read_csv)
PARQUET = TraceFormat("parquet", "Parquet tables", _is_parquet, read_parquet, read_parquet)
PAIRS = TraceFormat(
    "pairs",
    "JSON rows of a question and its answer, or of messages as text",
    _are_pairs,
    read_pairs,
    read_pairs,
)

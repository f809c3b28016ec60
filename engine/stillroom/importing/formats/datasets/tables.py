"""Reads tables: CSV and TSV, Parquet, and JSON rows of a question and its answer.

The columns with the conversation are named by the user, or found by common names. A table without
them may be one of feedback (see `feedback_tables.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.checks import describe
from stillroom.errors import DataError, InputError
from stillroom.importing.formats.datasets.conversations import (
    conversation,
    conversation_of_alpaca_row,
    conversation_of_sharegpt_row,
    is_completion_row,
    turns_of,
)
from stillroom.importing.formats.datasets.feedback_tables import (
    feedback_columns,
    feedback_of,
    is_feedback_row,
    read_feedback,
    score_of,
)
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    head_rows,
    read_json_rows,
)
from stillroom.importing.payloads.fields import as_list, as_row, parse_if_json
from stillroom.importing.payloads.messages import FILES_DROPPED, MessageReader
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.table_rows import PARQUET_MARK, Table, csv_table, is_csv, parquet_table
from stillroom.validation import did_you_mean

Columns = Mapping[str, str]
NO_COLUMN = "no column has the conversation"


def read_csv(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields the rows of CSV files with a header, located by their last lines.

    The columns that the user named apply to the tables that have one of them; others, such as a
    table of feedback, are read as if none were named. A table without columns for a conversation
    is one refused row. Raises InputError or DataError for named columns that are missing.
    """
    chosen = columns or {}
    has_match = any(_has_any_column(_header(path), chosen) for path in paths) if chosen else False
    for path in paths:
        with csv_table(path) as table:
            is_unrelated = has_match and not _has_any_column(table.columns, chosen)
            yield from _table_rows(path, table, {} if is_unrelated else chosen)


def _header(path: Path) -> Sequence[str]:
    with csv_table(path) as table:
        return table.columns


def _has_any_column(present: Collection[str], columns: Columns) -> bool:
    """Returns whether a table has one of the columns that the user named."""
    return any(
        part in present for name in columns.values() for part in name.split(_COLUMN_SEPARATOR)
    )


def read_parquet(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields the rows of Parquet files, in small batches.

    A table without columns for a conversation is one refused row. Raises MissingExtraError without
    pyarrow, and InputError or DataError if named columns are missing or the file is corrupt.
    """
    for path in paths:
        yield from _table_rows(path, parquet_table(path), columns or {})


def _table_rows(path: Path, table: Table, columns: Columns) -> Iterator[SourceRow]:
    """Yields the conversations in a table, or the feedback if it is a table of feedback."""
    feedback = feedback_columns(table.columns, columns)
    try:
        if columns and feedback is not None:
            yield from read_feedback(table.rows, feedback)
            return
        chosen = choose_columns(path, table.columns, columns)
    except DataError as error:
        if feedback is not None:
            yield from read_feedback(table.rows, feedback)
            return
        if columns:  # the user's choice is wrong for all tables
            raise
        detail = f"{error.fix}; the table has {', '.join(map(repr, table.columns))}"
        yield RefusedRow(Location(path, 1), NO_COLUMN, detail, tuple(table.columns))
        return
    yield from convert_rows(table.rows, lambda row: convert_table_row(row, chosen))


def read_pairs(paths: Sequence[Path], columns: Columns | None = None) -> Iterator[SourceRow]:
    """Yields the conversations of JSON rows, whose fields are the columns.

    Rows may have different fields. After the last row, raises InputError for a named column that no
    row had.
    """
    columns = columns or {}
    unseen = set(columns.values())

    def convert(row: JsonRow) -> Iterable[SourceRow]:
        unseen.difference_update([name for name in unseen if _has_column(row.data, name)])
        return _pair_rows(row, columns)

    yield from convert_rows(read_json_rows(*paths), convert)
    if unseen:
        name = min(unseen)
        raise InputError(
            f"no row has the column {name!r}", "correct the name in `columns`, or remove it"
        )


def _has_column(row: Row, name: str) -> bool:
    """Returns whether a row has a column, or all of those that are joined by `+`."""
    return all(column in row for column in _answer_columns(name, row))


def _pair_rows(row: JsonRow, columns: Columns) -> Iterable[SourceRow]:
    """Yields the conversation or the feedback in a JSON row."""
    feedback = feedback_columns(list(row.data), columns)
    if columns and feedback is not None:
        return feedback_of(row, feedback)
    # Unlike in a table, empty fields may be missing from a row.
    chosen = {role: name for role, name in columns.items() if _has_column(row.data, name)}
    reason = "no field has the conversation"
    if columns and not _has_conversation(chosen):
        raise UnreadableRowError(reason, f"the row has {', '.join(map(repr, row.data))}")
    try:
        chosen = choose_columns(row.location.path, list(row.data), chosen)
    except DataError as error:
        if feedback is not None:
            return read_feedback(iter([row]), feedback)
        raise UnreadableRowError(reason, error.fix) from error
    return convert_table_row(row, chosen)


def _is_parquet_file(path: Path, head: bytes) -> bool:
    return head.startswith(PARQUET_MARK)


def _is_pairs_file(path: Path, head: bytes) -> bool:
    if is_csv(path, head):
        return False
    return any(
        is_pair_row(row) or _has_messages_as_text(row) or is_feedback_row(row)
        for row in head_rows(head)
    )


def _has_messages_as_text(row: Row) -> bool:
    """Returns whether a row has its conversation as JSON text, as exported tables do."""
    text = row.get("messages", row.get("conversations"))
    return isinstance(text, str) and text.lstrip().startswith("[{")


CSV = TraceFormat("csv", "CSV and TSV tables", is_csv, read_csv, read_csv)
PARQUET = TraceFormat("parquet", "Parquet tables", _is_parquet_file, read_parquet, read_parquet)
PAIRS = TraceFormat(
    "pairs",
    "JSON rows of a question and its answer, of messages as text, or of feedback",
    _is_pairs_file,
    read_pairs,
    read_pairs,
)


_ALIASES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "chat"),
    "system": ("system", "system_prompt"),
    "user": ("user", "prompt", "question", "query", "problem"),
    "assistant": ("assistant", "completion", "response", "answer", "output"),
    "reasoning": ("reasoning_content", "reasoning", "thinking"),
    "tools": ("tools", "functions"),
    "id": ("id", "uuid"),
    "model": ("model", "generator"),
    "score": (),
}
"""The roles of columns, each with its common names, which are used if the user names none."""
_OTHER_ROLES = frozenset({"system", "id", "model"})
"""The roles of columns with common names that are read next to the columns the user named."""
_BLOCK_FIELDS = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "data",
    "tool_use": "input",
    "tool_result": "tool_use_id",
}
"""The blocks of Anthropic's messages, with a field that each has."""
_EMPTY = "the question or answer is empty or not text"
_MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
_EXAMPLE = "columns user=question assistant=answer"
_COLUMN_SEPARATOR = "+"
"""The separator of the columns that together form one answer."""


def choose_columns(path: Path, present: Collection[str], chosen: Columns) -> Columns:
    """Returns the column for each role that the file has.

    `chosen` maps roles (messages, system, user, assistant, reasoning, tools, id, model, score) to
    column names; if it is empty, columns with common names are chosen. They are also chosen for
    roles that do not replace what the user chose. `a+b` is an answer of several columns. Raises
    InputError for an unknown role or column, and DataError if the columns do not include a
    conversation.
    """
    for role, name in chosen.items():
        if role not in _ALIASES:
            fix = f"use one of {', '.join(_ALIASES)}, for example {_EXAMPLE}"
            problem = f"columns: {role!r} is not a known role of a column"
            raise InputError(problem + did_you_mean(role, tuple(_ALIASES)), fix)
        for part in _answer_columns(name, present) if role == "assistant" else [name]:
            if part in present:
                continue
            fix = f"its columns are {', '.join(map(repr, present))}"
            raise InputError(
                f"{path} has no column {part!r}{did_you_mean(part, tuple(present))}", fix
            )
    columns = _with_other_roles(present, chosen) or _columns_by_common_name(present)
    is_alpaca = "instruction" in present and ("output" in present or "response" in present)
    if not _has_conversation(columns) and (chosen or not is_alpaca):
        raise DataError(
            f"{path}: no known column for the conversation among {', '.join(map(repr, present))}",
            f"name them: {_EXAMPLE}, or messages=conversations; for a table of feedback, "
            "id=session_id score=rating",
        )
    return columns


def _columns_by_common_name(present: Collection[str]) -> Columns:
    """Returns the column for each role that has a column with a common name."""
    return {
        role: next(name for name in names if name in present)
        for role, names in _ALIASES.items()
        if any(name in present for name in names)
    }


def _with_other_roles(present: Collection[str], chosen: Columns) -> Columns:
    """Returns the chosen columns, and with those of a conversation what belongs to it by name.

    That is its system message, id and model, and the answer to `messages`.
    """
    if not _has_conversation(chosen):
        return chosen
    used = {part for name in chosen.values() for part in _answer_columns(name, present)}
    roles = _OTHER_ROLES | ({"assistant"} if "messages" in chosen else set[str]())
    common = _columns_by_common_name(present).items()
    others = {role: name for role, name in common if role in roles and name not in used}
    return {**others, **chosen}


def _has_conversation(columns: Columns) -> bool:
    return "messages" in columns or {"user", "assistant"} <= columns.keys()


def is_pair_row(row: Row) -> bool:
    """Returns whether a JSON row has only a question and its answer, under common names."""
    if is_completion_row(row) or "instruction" in row:
        return False
    columns = _columns_by_common_name(row)
    if "messages" in columns or not _has_conversation(columns) or len(row) > 8:
        return False
    return all(isinstance(row[columns[role]], str) for role in ("user", "assistant"))


def convert_table_row(row: JsonRow, columns: Columns) -> Iterable[SourceRow]:
    """Yields the conversation in one row of a table.

    Raises UnreadableRowError if there is none.
    """
    if not _has_conversation(columns):
        converted = conversation_of_alpaca_row(row)
    elif "messages" in columns:
        converted = _conversation_of_messages(row, columns)
    else:
        reader = MessageReader()
        messages = _question_and_answer(row.data, columns, reader)
        converted = replace(_conversation(row, columns, messages), dropped=tuple(reader.dropped))
    yield _make_metadata_json_safe(converted)


def _conversation_of_messages(row: JsonRow, columns: Columns) -> LoggedConversation:
    """Returns the conversation of a row with messages, whose last answer may be in a column."""
    turns = _parse_messages(row.data.get(columns["messages"]), columns["messages"])
    chat = conversation_of_sharegpt_row(JsonRow(row.location, {"conversations": turns}))
    reader, messages = MessageReader(), chat.messages
    if messages[-1]["role"] != "assistant" and "assistant" in columns:
        has_blocks = any(isinstance(as_row(turn).get("content"), list) for turn in as_list(turns))
        if has_blocks and parse_if_json(_answer(row.data, columns["assistant"])) == []:
            raise UnreadableRowError(_EMPTY, f"{columns['assistant']} is a reply without blocks")
        messages += _turns(row.data, columns, "assistant", reader)
    else:  # The column is not the answer, so it is metadata.
        columns = {role: name for role, name in columns.items() if role != "assistant"}
    system = _text_of(row.data, columns, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    dropped = tuple(dict.fromkeys([*chat.dropped, *reader.dropped]))
    return replace(_conversation(row, columns, messages), dropped=dropped)


def _parse_messages(value: Any, name: str) -> Any:
    """Returns a row's messages, parsed if they are JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UnreadableRowError("the messages are not valid JSON", f"{name}: {error}") from error


def _answer_columns(name: str, present: Collection[str]) -> list[str]:
    """Returns the columns of an answer: one, or several joined by `+`."""
    return [name] if name in present else name.split(_COLUMN_SEPARATOR)


def _answer(data: Row, name: str) -> Any:
    """Returns the answer in a row: the value of a column, or a JSON object of several columns."""
    columns = _answer_columns(name, data)
    if len(columns) == 1:
        return data.get(name)
    parts = {column: data.get(column) for column in columns}
    if all(part in (None, "") for part in parts.values()):
        return None
    return msgspec.json.encode(parts, enc_hook=str).decode()


def _question_and_answer(data: Row, columns: Columns, reader: MessageReader) -> list[Row]:
    """Returns the messages of a row with a question and an answer in separate columns."""
    question, answer = (_turns(data, columns, role, reader) for role in ("user", "assistant"))
    reply = answer[0]
    reasoning = _text_of(data, columns, "reasoning")
    if reasoning and reply["role"] == "assistant":
        reply["reasoning_content"] = reasoning
    system = _text_of(data, columns, "system")
    has_own = question[0]["role"] == "system"
    first = [{"role": "system", "content": system}] if system and not has_own else []
    return [*first, *question, *answer]


def _turns(data: Row, columns: Columns, role: str, reader: MessageReader) -> list[Row]:
    """Returns the messages of a row's question or answer: a text, messages, or one's blocks.

    In a table of texts, messages and blocks are JSON. Raises UnreadableRowError if it is empty.
    """
    value = _answer(data, columns[role]) if role == "assistant" else data.get(columns[role])
    parsed = as_list(parse_if_json(value))
    turns = [{"role": role, "content": parsed}] if _are_all(parsed, _is_block) else parsed
    if _are_all(turns, _is_message):
        return reader.turns(turns, role)
    is_blank = not value.strip() if isinstance(value, str) else not value
    if is_blank or not isinstance(value, str | list):
        detail = f"{columns[role]} must be non-empty text or messages, not {describe(value)}"
        raise UnreadableRowError(_EMPTY, detail)
    return turns_of(value, role, reader)


def _are_all(items: list[Any], matches: Callable[[Row], bool]) -> bool:
    return bool(items) and all(matches(as_row(item)) for item in items)


def _is_block(item: Row) -> bool:
    """Returns whether an element of a list is a block of a message, not of an answer in JSON."""
    field = _BLOCK_FIELDS.get(str(item.get("type")))
    return field is not None and field in item


def _is_message(item: Row) -> bool:
    return item.get("role") in _MESSAGE_ROLES and "content" in item


def _conversation(row: JsonRow, columns: Columns, messages: list[Row]) -> LoggedConversation:
    """Returns the conversation of a table's row, with the columns for its other roles."""
    data, name = row.data, columns.get("score")
    score = score_of(data.get(name)) if name is not None else None
    return conversation(
        row,
        messages,
        MessageReader(),
        used=tuple(column for name in columns.values() for column in _answer_columns(name, data)),
        tools=data.get(columns["tools"]) if "tools" in columns else None,
        id=_text_of(data, columns, "id"),
        model=_text_of(data, columns, "model"),
        **({} if name is None else {"scores": {} if score is None else {name: score}}),
    )


def _text_of(data: Row, columns: Columns, role: str) -> str | None:
    value = data.get(columns[role]) if role in columns else None
    return None if value in (None, "") else str(value)


def _make_metadata_json_safe(row: LoggedConversation) -> LoggedConversation:
    """Removes bytes (files, images) from the metadata, and converts dates to strings."""
    metadata, dropped = Row(), dict.fromkeys(row.dropped)
    for key, value in row.metadata.items():
        if isinstance(value, bytes) or isinstance(as_row(value).get("bytes"), bytes):
            dropped[FILES_DROPPED] = None
        else:
            metadata[key] = msgspec.to_builtins(value, enc_hook=str)
    return replace(row, metadata=metadata, dropped=tuple(dropped))

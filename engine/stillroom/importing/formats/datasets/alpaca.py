"""Reads Alpaca rows, also Dolly's: an instruction, an input that belongs to it, an output."""

from collections.abc import Iterator
from typing import Any, cast

from stillroom.data.checks import describe
from stillroom.importing.formats.datasets.openai_files import other_fields
from stillroom.importing.json_rows import JsonRow, Row, UnreadableRowError, convert_rows, has_row
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat

_OUTPUTS = ("output", "response")
_INPUTS = ("input", "context")
_FIELDS = ("instruction", "system", "history", "id", *_OUTPUTS, *_INPUTS)


def is_alpaca_row(row: Row) -> bool:
    """Returns whether a row has the text of an instruction and that of its output."""
    has_output = any(isinstance(row.get(name), str) for name in _OUTPUTS)
    return isinstance(row.get("instruction"), str) and has_output


def conversation_of_alpaca_row(row: JsonRow) -> LoggedConversation:
    """Returns the conversation of an Alpaca row: the input follows the instruction after a blank
    line.

    Raises UnreadableRowError if it holds none.
    """
    data = row.data
    if not is_alpaca_row(data):
        detail = f"instruction and output must be texts, not {describe(data.get('instruction'))}"
        raise UnreadableRowError("has no instruction and output", detail)
    output = next(data[name] for name in _OUTPUTS if isinstance(data.get(name), str))
    extra = next((data[name] for name in _INPUTS if isinstance(data.get(name), str)), "")
    user = "\n\n".join(text for text in (data["instruction"], extra) if text)
    system = data.get("system")
    has_system = isinstance(system, str) and system
    return LoggedConversation(
        place=row.place,
        messages=[
            *([{"role": "system", "content": system}] if has_system else []),
            *_earlier_turns(data.get("history")),
            {"role": "user", "content": user},
            {"role": "assistant", "content": output},
        ],
        is_call=False,
        id=data["id"] if isinstance(data.get("id"), str) else None,
        metadata=other_fields(data, _FIELDS),
    )


def _earlier_turns(history: Any) -> Iterator[Row]:
    """Yields the messages of earlier turns, which are pairs of a question and its answer."""
    for pair in cast("list[Any]", history) if isinstance(history, list) else []:
        texts = cast("list[Any]", pair) if isinstance(pair, list) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            detail = f"history must hold pairs of texts, not {describe(pair)}"
            raise UnreadableRowError("the history cannot be read", detail)
        yield {"role": "user", "content": texts[0]}
        yield {"role": "assistant", "content": texts[1]}


def _rows(row: JsonRow) -> Iterator[SourceRow]:
    yield conversation_of_alpaca_row(row)


ALPACA = TraceFormat(
    name="alpaca",
    title="Alpaca and Dolly datasets",
    is_recognised=has_row(is_alpaca_row),
    read=lambda paths: convert_rows(paths, _rows),
)

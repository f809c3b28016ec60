"""Finds the columns of a table that hold a conversation, and turns its rows into conversations."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.checks import as_number, describe
from stillroom.data.layouts.foreign import as_object
from stillroom.errors import DataError, InputError
from stillroom.importing.formats.datasets.openai_files import is_completion_row, turns_of
from stillroom.importing.formats.datasets.sharegpt_alpaca import (
    conversation_of_alpaca_row,
    conversation_of_sharegpt_row,
)
from stillroom.importing.json_rows import JsonRow, Row, UnreadableRowError
from stillroom.importing.payloads.messages import FILES_LOST, ChatReader, tool_schemas
from stillroom.importing.records import LoggedConversation, SourceRow
from stillroom.validation import nearest

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
"""What a column can hold, and the names by which it is found if nobody says which one does."""
_EXAMPLE = "columns user=question assistant=answer"


@dataclass(frozen=True, slots=True)
class ChosenColumns:
    """The name of the column that holds each thing; a thing that no column holds is left out."""

    names: Mapping[str, str]

    @property
    def hold_a_conversation(self) -> bool:
        """Whether these columns are enough."""
        return "messages" in self.names or {"user", "assistant"} <= self.names.keys()


def choose_columns(
    path: Path, present: Collection[str], chosen: Mapping[str, str]
) -> ChosenColumns:
    """Returns the columns to read of a file with the columns `present`.

    `chosen` maps what a column holds (messages, system, user, assistant, reasoning, tools, id,
    model, score) to its name; if it is empty, columns with usual names are taken. Raises InputError
    for a choice that names nothing, DataError if no columns hold a conversation.
    """
    for thing, name in chosen.items():
        if thing not in _ALIASES:
            fix = f"choose among {', '.join(_ALIASES)}, for example {_EXAMPLE}"
            problem = f"columns: {thing!r} is nothing that a column holds"
            raise InputError(problem + nearest(thing, tuple(_ALIASES)), fix)
        if name not in present:
            fix = f"choose among {', '.join(map(repr, present))}"
            raise InputError(f"{path} has no column {name!r}{nearest(name, tuple(present))}", fix)
    columns = ChosenColumns(chosen or _found(present))
    if not columns.hold_a_conversation and not (not chosen and _is_alpaca(present)):
        raise DataError(
            f"{path}: no column holds the conversation; it has {', '.join(map(repr, present))}",
            f"say which do: {_EXAMPLE}, or messages=conversations; of a table of feedback "
            "id=session_id score=rating",
        )
    return columns


def _found(present: Collection[str]) -> dict[str, str]:
    by_thing = {
        thing: next((name for name in names if name in present), None)
        for thing, names in _ALIASES.items()
    }
    return {thing: name for thing, name in by_thing.items() if name is not None}


def _is_alpaca(present: Collection[str]) -> bool:
    return "instruction" in present and ("output" in present or "response" in present)


def is_pair_row(row: Row) -> bool:
    """Returns whether a JSON row is a question and its answer under usual names, and no other."""
    if is_completion_row(row) or "instruction" in row:
        return False
    columns = ChosenColumns(_found(row))
    if "messages" in columns.names or not columns.hold_a_conversation or len(row) > 8:
        return False
    names = [columns.names[thing] for thing in ("user", "assistant")]
    return all(isinstance(row[name], str) for name in names)


def convert_table_row(row: JsonRow, columns: ChosenColumns) -> Iterable[SourceRow]:
    """Yields the conversation of one row of a table.

    Raises UnreadableRowError if it holds none.
    """
    names = columns.names
    if not columns.hold_a_conversation:
        yield _with_clean_metadata(conversation_of_alpaca_row(row))
        return
    data = row.data
    if "messages" in names:
        yield _with_clean_metadata(_whole_conversation(row, names))
        return
    question, answer = (data.get(names[thing]) for thing in ("user", "assistant"))
    reader = ChatReader()
    for thing, value in (("user", question), ("assistant", answer)):
        is_blank = not value.strip() if isinstance(value, str) else not value
        if is_blank or not isinstance(value, str | list):
            detail = f"{names[thing]} must be a text or messages, not {describe(value)}"
            raise UnreadableRowError("a column holds no text", detail)
    replies = turns_of(answer, "assistant", reader)
    reasoning = _text_of(data, names, "reasoning")
    if reasoning and replies[0]["role"] == "assistant":
        replies[0]["reasoning_content"] = reasoning
    system = _text_of(data, names, "system")
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        *turns_of(question, "user", reader),
        *replies,
    ]
    read = _conversation(row, names, messages)
    yield _with_clean_metadata(replace(read, losses=tuple(reader.losses)))


def _whole_conversation(row: JsonRow, names: Mapping[str, str]) -> LoggedConversation:
    value = row.data.get(names["messages"])
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            detail = f"{names['messages']}: {error}"
            raise UnreadableRowError("the messages are not valid JSON", detail) from error
    read = conversation_of_sharegpt_row(JsonRow(row.place, {"conversations": value}))
    return replace(_conversation(row, names, read.messages), losses=read.losses)


def _conversation(
    row: JsonRow, names: Mapping[str, str], messages: list[Row]
) -> LoggedConversation:
    data = row.data
    score = _number(data.get(names["score"])) if "score" in names else None
    return LoggedConversation(
        place=row.place,
        messages=messages,
        tools=tool_schemas(data.get(names["tools"])) if "tools" in names else None,
        is_call=False,
        id=_text_of(data, names, "id"),
        model=_text_of(data, names, "model"),
        scores={} if score is None else {names["score"]: score},
        metadata={
            key: value
            for key, value in data.items()
            if key not in names.values() and value is not None
        },
    )


def _text_of(data: Row, names: Mapping[str, str], thing: str) -> str | None:
    value = data.get(names[thing]) if thing in names else None
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else str(value)


def _number(value: Any) -> float | None:
    """Returns a number, also one that a text holds, as in CSV."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, str):
        return as_number(value)
    words = {"true": 1.0, "false": 0.0}
    try:
        return words[value.lower()] if value.lower() in words else float(value)
    except ValueError:
        return None


def _with_clean_metadata(conversation: LoggedConversation) -> LoggedConversation:
    """Leaves bytes (files, images) out of the metadata, and writes dates as JSON does."""
    losses = dict.fromkeys(conversation.losses)
    kept = dict(_writable(conversation.metadata, losses))
    return replace(conversation, metadata=kept, losses=tuple(losses))


def _writable(metadata: Row, losses: dict[str, None]) -> Iterator[tuple[str, Any]]:
    for key, value in metadata.items():
        if isinstance(value, bytes) or isinstance(as_object(value).get("bytes"), bytes):
            losses[FILES_LOST] = None
        else:
            yield key, msgspec.to_builtins(value, enc_hook=str)

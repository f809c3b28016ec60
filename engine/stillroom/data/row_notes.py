"""Notes on rows that are well formed, but that teach something else than they seem to."""

from collections.abc import Sequence
from typing import Any

from stillroom.data.formats import DpoRow, SftRow


def calls_tools(messages: Sequence[Any]) -> bool:
    """Returns whether a message of a conversation calls a tool."""
    return any(message.get("tool_calls") for message in messages)


def tools_notes(num_without: int, num_rows: int) -> list[str]:
    """Returns a note if some of the rows call tools whose schemas they lack, or []."""
    if not num_without:
        return []
    note = (
        f"{num_without} of {num_rows} rows call tools but have no `tools`: a student trained on "
        "them never reads a schema. Write the schemas, or the names of functions in tools.py, into "
        "each row's tools; import_rollouts with infer_tools infers schemas from a log's calls"
    )
    return [note]


def notes_on_rows(rows: Sequence[SftRow] | Sequence[DpoRow]) -> list[str]:
    """Returns the notes on rows that are trained on."""
    without = sum(not row.tools and calls_tools(_messages_of(row)) for row in rows)
    return tools_notes(without, len(rows))


def _messages_of(row: SftRow | DpoRow) -> list[Any]:
    if isinstance(row, SftRow):
        return list(row.messages)
    return [*row.prompt, *row.chosen, *row.rejected]

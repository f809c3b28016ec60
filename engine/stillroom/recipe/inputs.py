"""Reads the texts and right answers of a recipe from prompt files and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from stillroom.data.formats import RowFormat, detect_format, read_rows, task_from_row
from stillroom.data.instruction import Instruction
from stillroom.data.words import user_texts
from stillroom.errors import DataError
from stillroom.importing.records import RejectedRow
from stillroom.importing.table_rows import read_any_rows

_TEXT_NAMES = ("text", "prompt", "question", "message", "input", "query", "body", "content")
_ANSWER_NAMES = ("label", "expected_answer", "answer", "category", "class", "target", "output")
_IMPORT_FIX = (
    "import_rollouts(input=…, prompts=true) makes prompts of logs and conversations; give those"
)
_TABLE_FIX = (
    f"name the column of texts {_TEXT_NAMES[0]!r}, and that of answers {_ANSWER_NAMES[0]!r}"
)


@dataclass(frozen=True, slots=True)
class RecipePrompt:
    """A prompt, as a row of a prompts file, with its text and the right answer if it is known."""

    row: dict[str, Any]
    text: str
    """What the user says in it."""
    answer: str | None


def read_examples(
    path: Path, *, system: str | None, with_answers: bool = False
) -> list[RecipePrompt]:
    """Returns the prompts of a file, each once: of a prompts file, or of a table of texts.

    system: replaces the prompts' system messages; None keeps them. Raises DataError if the file
    has no prompts, or, `with_answers`, if a prompt has no answer.
    """
    is_prompts = _is_prompts_file(path)
    rows = read_rows(path, RowFormat.PROMPTS) if is_prompts else _table_rows(path, with_answers)
    found: dict[str, RecipePrompt] = {}
    for row in rows:
        task = task_from_row(row)
        messages = Instruction(system=system).put_before(task.messages)
        text = "\n".join(user_texts(map(dict, messages)))
        given = task.metadata.get("expected_answer")
        kept = {k: v for k, v in row.items() if k not in ("prompt", "system", "system_prompt")}
        answer = given if isinstance(given, str) else None
        if with_answers and given is None:
            raise DataError(
                f"{path} has a prompt without an answer: {text[:80]!r}",
                "put the right answer of every row into metadata.expected_answer, or into the "
                f"column {_ANSWER_NAMES[0]!r}",
            )
        found.setdefault(text, RecipePrompt({**kept, "messages": messages}, text, answer))
    if not found:
        raise DataError(f"{path} has no prompts", "write one text per row")
    return list(found.values())


def _is_prompts_file(path: Path) -> bool:
    """Returns whether a file has rows of prompts, rather than those of a table.

    Raises DataError if its rows are conversations with answers.
    """
    if path.suffix == ".txt":
        return True
    first = next((row for row in read_any_rows(path) if not isinstance(row, RejectedRow)), None)
    if first is None:
        raise DataError(f"{path} has no rows that can be read", _TABLE_FIX)
    kind = detect_format(first.data)
    if kind in (RowFormat.ROLLOUTS, RowFormat.SFT, RowFormat.DPO):
        raise DataError(f"{path} has conversations with answers, not prompts", _IMPORT_FIX)
    return kind is RowFormat.PROMPTS and path.suffix == ".jsonl"


def _table_rows(path: Path, with_answers: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table as prompts; other columns than text and answer become metadata."""
    rows = [row.data for row in read_any_rows(path) if not isinstance(row, RejectedRow)]
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if all(isinstance(row.get(name), str | int | float | None) for row in rows)
    ]
    text = _named(columns, _TEXT_NAMES) or _longest(columns, rows)
    if text is None:
        raise DataError(f"{path} has no column of texts", _TABLE_FIX)
    others = [name for name in columns if name != text]
    answer = _named(others, _ANSWER_NAMES)
    if answer is None and with_answers and len(others) == 1:
        [answer] = others
    if answer is None and with_answers:
        raise DataError(
            f"{path}: which of the columns {', '.join(others) or '(none)'} has the right answers "
            "is not clear",
            f"rename it to {_ANSWER_NAMES[0]!r}",
        )
    for row in rows:
        if not str(row.get(text) or "").strip():
            continue
        metadata = {name: row[name] for name in others if row.get(name) not in (None, "")}
        if answer is not None and answer in metadata:
            metadata["expected_answer"] = str(metadata.pop(answer)).strip()
        yield {"messages": [{"role": "user", "content": str(row[text])}], "metadata": metadata}


def _named(columns: Sequence[str], names: Sequence[str]) -> str | None:
    by_name = {column.strip().lower(): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), None)


def _longest(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str | None:
    """Returns the column with the longest texts on average; None without columns."""

    def mean_length(name: str) -> float:
        return fmean(len(str(row.get(name) or "")) for row in rows)

    return max(columns, key=mean_length, default=None)

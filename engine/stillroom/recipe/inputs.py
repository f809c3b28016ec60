"""Reads the texts and right answers of a recipe from prompt files and tables."""

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from stillroom import fences
from stillroom.data.formats import RowFormat, detect_format, read_rows, task_from_row
from stillroom.data.instruction import Instruction
from stillroom.data.words import user_texts
from stillroom.errors import DataError
from stillroom.files import content_hash
from stillroom.importing.records import RefusedRow
from stillroom.importing.table_rows import read_any_rows
from stillroom.recipe.answers import label_set, object_in, spelling_key
from stillroom.rollout.rewards.matchers import as_expected_answer

_TEXT_NAMES = ("text", "prompt", "question", "message", "input", "query", "body", "content")
_LABEL_NAMES = ("label", "expected_answer")
_ANSWER_NAMES = (
    *_LABEL_NAMES, "answer", "category", "class", "target", "output", "intent", "topic", "tag",
    "kategorie", "klasse", "antwort", "categoria", "etiqueta", "respuesta", "categorie",
    "etiquette",
)  # fmt: skip
"""Names of columns of answers; they are compared without case and accents."""
_MAX_REJECTED_SHARE, _MIN_IDS = 0.05, 20
_ANSWERED_FIX = "give a table of texts and labels, or prompts; only `input` may be conversations"
LABELS_FROM = "the labels are from column"
"""What the note on a recognised column of labels says before its name."""
_TABLE_FIX = "rename the text column to 'text' and the label column to 'label'"


@dataclass(frozen=True)
class RecipePrompt:
    """A row of a prompts file, with its text and the right answer if it is known."""

    row: dict[str, Any]
    text: str
    """The text of the user messages."""
    answer: str | None
    """The right answer; None if it is unknown or not a single text."""

    @property
    def is_answered(self) -> bool:
        """Whether the row has a right answer, as a text or otherwise."""
        expected = (self.row.get("metadata") or {}).get("expected_answer")
        return expected is not None and not _is_blank(expected)

    @property
    def answer_key(self) -> str | None:
        """A key that all spellings of the right answer share; None without a right answer."""
        if not self.is_answered:
            return None
        expected = self.row["metadata"]["expected_answer"]
        if isinstance(expected, str):
            expected = as_expected_answer(expected)
        is_text = isinstance(expected, str)
        return spelling_key(expected if is_text else json.dumps(expected, sort_keys=True))

    @property
    def has_tools(self) -> bool:
        """Whether the prompt runs in a container, which provides tools, or has tool calls."""
        return bool(self.row.get("docker")) or any(
            message.get("tool_calls") for message in self.row["messages"]
        )

    @cached_property
    def task_id(self) -> str:
        """The id of the prompt's task, which its rollouts share."""
        return task_from_row(self.row).task_id

    def with_answer(self, answer: str) -> "RecipePrompt":
        """Returns the prompt with another right answer."""
        expected = as_expected_answer(answer)
        metadata = {**(self.row.get("metadata") or {}), "expected_answer": expected}
        return RecipePrompt({**self.row, "metadata": metadata}, self.text, answer)

    def with_object(self) -> "RecipePrompt":
        """Returns the prompt with its right answer parsed, if that is a JSON object; else itself.

        Answers are then compared by their fields, not as texts.
        """
        expected = (self.row.get("metadata") or {}).get("expected_answer")
        text = json.dumps(expected) if isinstance(expected, dict) else self.answer
        values = object_in(text) if text is not None else None
        if values is None or as_expected_answer(text or "") == text:
            return self
        return self.with_answer(json.dumps(values, ensure_ascii=False))

    def without_answer(self) -> "RecipePrompt":
        """Returns the prompt without its right answer."""
        metadata = dict(self.row.get("metadata") or {})
        metadata.pop("expected_answer", None)
        return RecipePrompt({**self.row, "metadata": metadata}, self.text, None)


@dataclass(slots=True)
class LoadedPrompts:
    """The distinct prompts of a file, and notes for the user on omitted rows."""

    prompts: list[RecipePrompt] = field(default_factory=list[RecipePrompt])
    notes: list[str] = field(default_factory=list[str])
    answer_column: str | None = None
    """The column of a table that the right answers are from; None without one."""


def read_prompts(path: Path, *, system: str | None, is_labelled: bool = False) -> LoadedPrompts:
    """Returns the prompts of a file, which may be a prompts file or a table of texts.

    system: replaces the prompts' system messages; None keeps them. is_labelled: prompts without a
    right answer are left out, as are equal prompts with different answers.
    Raises DataError if there are no prompts, if more than 5 % of the rows cannot be read, or if
    most answers are missing.
    """
    read, by_hash = LoadedPrompts(), dict[str, RecipePrompt]()
    contradicted, unlabelled, num_labelled = set[str](), list[str](), 0
    rows = read_rows(path, RowFormat.PROMPTS) if _is_prompts_file(path) else None
    for row in _table_rows(path, read, is_labelled=is_labelled) if rows is None else rows:
        prompt = _recipe_prompt(row, system)
        if is_labelled and not prompt.is_answered:
            unlabelled.append(prompt.text)
            continue
        num_labelled += 1
        key = content_hash(prompt.row["messages"])
        earlier = by_hash.setdefault(key, prompt)
        if earlier.answer_key is None and prompt.answer_key is not None:
            by_hash[key] = prompt
        elif prompt.answer_key not in (None, earlier.answer_key):
            contradicted.add(key)
    if len(unlabelled) > num_labelled:
        raise DataError(
            f"{path} has {len(unlabelled)} prompts without an answer, such as "
            f"{unlabelled[0][:80]!r}",
            "put the right answer of every row into metadata.expected_answer, or into the "
            "column 'label'",
        )
    if not by_hash:
        raise DataError(f"{path} has no prompts", "write one text per row")
    if unlabelled:
        read.notes.append(f"{path.name}: {len(unlabelled)} texts without a label: left out")
    if contradicted:
        read.notes.append(f"{path.name}: {len(contradicted)} texts have several labels: left out")
    read.prompts = [prompt for key, prompt in by_hash.items() if key not in contradicted]
    return read


def _recipe_prompt(row: dict[str, Any], system: str | None) -> RecipePrompt:
    """Returns a row of any layout as a prompt with `messages` and `metadata`."""
    task = task_from_row(row)
    messages = Instruction(system=system).apply_to(task.messages)
    others = {k: v for k, v in row.items() if k not in ("prompt", "system", "system_prompt")}
    answer = task.metadata.get("expected_answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    text = "\n".join(user_texts(map(dict, messages)))
    return RecipePrompt(
        {**others, "messages": messages},
        text,
        answer if isinstance(answer, str) and not _is_blank(answer) else None,
    )


def _is_blank(value: object) -> bool:
    """Returns whether a value is a text of whitespace alone, as in an empty cell of a table."""
    return isinstance(value, str) and not value.strip()


def _is_prompts_file(path: Path) -> bool:
    """Returns whether a file has rows of prompts rather than a table.

    Raises DataError if its rows are conversations with answers.
    """
    if path.suffix == ".txt":
        return True
    first = next((row for row in read_any_rows(path) if not isinstance(row, RefusedRow)), None)
    if first is None:
        raise DataError(f"{path} has no rows that can be read", _TABLE_FIX)
    kind = detect_format(first.data)
    if kind in (RowFormat.ROLLOUTS, RowFormat.SFT, RowFormat.DPO):
        raise DataError(f"{path} has conversations with answers, not prompts", _ANSWERED_FIX)
    return kind is RowFormat.PROMPTS and path.suffix == ".jsonl"


def _table_rows(path: Path, read: LoadedPrompts, *, is_labelled: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table as prompts; other columns than text and answer become metadata."""
    rows = _readable_rows(path, read)
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if all(isinstance(row.get(name), str | int | float | None) for row in rows)
    ]
    text = _column_named(columns, _TEXT_NAMES) or _longest_column(columns, rows)
    if text is None:
        raise DataError(f"{path} has no text column", _TABLE_FIX)
    others = [name for name in columns if name != text]
    # In a table without labels, "category" may be any metadata, e.g. the category of a product.
    answer = _column_named(others, _ANSWER_NAMES if is_labelled else _LABEL_NAMES)
    if answer is None and is_labelled and len(others) == 1:
        values = [value for row in rows if (value := row.get(others[0])) not in (None, "")]
        # A column in which all values differ holds ids or dates, not labels.
        is_id = len(set(values)) == len(values) >= _MIN_IDS
        answer = None if is_id else others[0]
    if answer is None and is_labelled:
        answer = _only_label_column(others, rows)
    if answer is None and is_labelled:
        raise DataError(
            f"{path}: cannot tell which column has the labels: {', '.join(others) or '(none)'}",
            "rename the column with the right answers to 'label'",
        )
    read.answer_column = answer
    if answer is not None and answer not in _LABEL_NAMES:
        read.notes.append(f"{path.name}: {LABELS_FROM} {fences.safe_name(answer)!r}")
    for row in rows:
        if not str(row.get(text) or "").strip():
            continue
        metadata = {
            name: row[name]
            for name in others
            if row.get(name) is not None and not _is_blank(row[name])
        }
        if answer is not None and answer in metadata:
            metadata["expected_answer"] = str(metadata.pop(answer)).strip()
        yield {"messages": [{"role": "user", "content": str(row[text])}], "metadata": metadata}


def _only_label_column(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str | None:
    """Returns the only column of words, apart from ids, if its values are from a small set."""
    values = {
        name: [str(value) for row in rows if not _is_blank(value := row.get(name) or "")]
        for name in columns
    }
    words = {
        name: texts
        for name, texts in values.items()
        if any(letter.isalpha() for text in texts for letter in text)
        and (len(set(texts)) < len(texts) or any(" " in text for text in texts))
    }
    if len(words) != 1:
        return None
    [(name, texts)] = words.items()
    return name if label_set(texts) else None


def _readable_rows(path: Path, read: LoadedPrompts) -> list[dict[str, Any]]:
    """Returns the rows of a table, and notes how many cannot be read.

    Raises DataError if more than 5 % cannot be read.
    """
    rows, rejected = list[dict[str, Any]](), list[RefusedRow]()
    for row in read_any_rows(path):
        if isinstance(row, RefusedRow):
            rejected.append(row)
        else:
            rows.append(row.data)
    if len(rejected) > _MAX_REJECTED_SHARE * (len(rows) + len(rejected)):
        first = rejected[0]
        raise DataError(
            f"{path}: {len(rejected)} of {len(rows) + len(rejected)} rows cannot be read, the "
            f"first at line {first.location.line}: {first.reason}",
            "correct them; a file from a spreadsheet must be saved as UTF-8",
        )
    if rejected:
        read.notes.append(f"{path.name}: {len(rejected)} rows cannot be read and are left out")
    return rows


def _column_named(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Returns the first of the `names` that is a column, as the column spells it, or None."""
    by_name = {_without_accents(column).strip().lower(): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), None)


def _without_accents(text: str) -> str:
    return "".join(
        one for one in unicodedata.normalize("NFKD", text) if not unicodedata.combining(one)
    )


def _longest_column(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str | None:
    """Returns the column with the longest texts on average; None without columns."""

    def mean_length(name: str) -> float:
        return fmean(len(str(row.get(name) or "")) for row in rows)

    return max(columns, key=mean_length, default=None)

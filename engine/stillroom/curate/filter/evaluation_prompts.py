"""The prompts of evaluation files, which must not be trained on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillroom.curate.filter.contamination import EvaluationPrompt
from stillroom.curate.rows.words import user_texts, words_of
from stillroom.data.checks import Problem
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import (
    decode_line,
    decode_text_line,
    read_row_lines,
    rollout_files,
)
from stillroom.errors import DataError


def evaluation_prompts(path: Path) -> Iterator[EvaluationPrompt]:
    """Yields the prompts of a file or folder in any format: what the user says in each row.

    Raises DataError at a row that has a problem: a prompt that is passed over would be trained on.
    """
    num_prompts = 0
    for file in [path] if path.is_file() else rollout_files(path):
        decode = decode_text_line if file.suffix == ".txt" else decode_line
        for line in read_row_lines(file):
            where = f"{file}:{line.number}"
            text = "\n".join(user_texts(_messages(decode(line), where)))
            num_prompts += 1
            yield EvaluationPrompt(where, tuple(words_of(text)))
    if not num_prompts:
        raise DataError(f"the evaluation file {path} holds no prompts", "give another one")


def _messages(row: dict[str, Any] | Problem, where: str) -> list[Any]:
    row_format = None if isinstance(row, Problem) else detect_format(row)
    if isinstance(row, Problem) or row_format is None:
        what = row.message if isinstance(row, Problem) else "is of no known format"
        raise DataError(f"{where}: the line {what}", 'write e.g. {"prompt": "…"} on each line')
    problem = next(iter(CHECKS[row_format](row)), None)
    if problem is not None:
        raise DataError(f"{where}: {problem.field} {problem.message}", problem.fix)
    match row_format:
        case RowFormat.PROMPTS:
            return list(task_from_row(row).messages)
        case RowFormat.ROLLOUTS:
            return as_rollout(row)["messages"]
        case RowFormat.SFT:
            return row["messages"]
        case RowFormat.DPO:
            return row["prompt"]

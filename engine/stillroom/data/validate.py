"""Checking a whole data file: every problem with its line, then what the file holds."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from stillroom.data.checks import Problem, as_number
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts import RolloutLayout, as_rollout, layout_of
from stillroom.data.row_files import (
    decode_line,
    decode_text_line,
    read_row_lines,
    rollout_files,
)
from stillroom.errors import DataError
from stillroom.files import content_hash
from stillroom.settings import Workspace


class ValidateDataset(BaseModel):
    """Ask whether a data file is well formed, and what it holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, Field(description="File, or folder of .jsonl or .json files")]
    format: Annotated[
        Literal["auto", "prompts", "rollouts", "sft", "dpo"],
        Field(description="auto: by the first good row"),
    ] = "auto"
    max_problems: Annotated[int, Field(ge=1, le=1000, description="How many to list")] = 20
    category_field: Annotated[str, Field(description="Metadata field to count")] = "task_type"


class RowProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem and where it is."""

    where: str
    """`file:line`."""
    field: str
    problem: str
    fix: str


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in five numbers."""

    low: float
    median: float
    p95: float
    high: float
    mean: float


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a data file holds. rows = good + bad, always."""

    path: str
    format: str
    rows: int
    good: int
    bad: int
    num_problems: int
    problems: list[RowProblem]
    duplicates: int
    """Good rows that say the same as an earlier one."""
    messages: Quantiles | None
    """Per row."""
    characters: Quantiles | None
    """Of a row's JSON."""
    rewards: Quantiles | None
    categories: dict[str, int]
    layouts: dict[str, int]
    """Good rollouts by the system whose layout they have: stillroom, rnow, nemo_gym."""
    failed: int
    """Good rollouts that an infrastructure failure ended; they have no reward."""
    success_unknown: int
    """Good rollouts that do not say whether they succeeded: curation goes by reward or answer."""


class _Survey:
    """Collects what the good rows hold."""

    def __init__(self, row_format: RowFormat, category_field: str) -> None:
        self._format, self._category_field = row_format, category_field
        self._seen: set[str] = set()
        self.duplicates = 0
        self.messages: list[float] = []
        self.characters: list[float] = []
        self.rewards: list[float] = []
        self.categories: Counter[str] = Counter()
        self.layouts: Counter[str] = Counter()
        self.failed = self.success_unknown = 0

    def add(self, row: dict[str, Any], num_bytes: int) -> None:
        if self._format is RowFormat.ROLLOUTS:
            self.layouts[layout_of(row) or RolloutLayout.STILLROOM] += 1
            row = as_rollout(row)
            self.failed += row.get("error") is not None
            self.success_unknown += row.get("success") is None and row.get("error") is None
        conversation = _conversation(row, self._format)
        identity = content_hash([conversation, row.get("metadata")])
        self.duplicates += identity in self._seen
        self._seen.add(identity)
        self.messages.append(len(conversation))
        self.characters.append(num_bytes)
        if (reward := as_number(row.get("reward"))) is not None:
            self.rewards.append(reward)
        category = _metadata(row, self._format).get(self._category_field)
        if category is not None:
            self.categories[str(category)] += 1


def validate_dataset(workspace: Workspace, request: ValidateDataset) -> ValidationReport:
    """Returns every problem of the file (listed up to `max_problems`) and what it holds.

    Raises DataError if the file is empty or its format cannot be told.
    """
    path = workspace.existing(request.path, what="path")
    row_format = _format_of(path, request.format)
    survey = _Survey(row_format, request.category_field)
    listed: list[RowProblem] = []
    rows = bad = num_problems = 0
    for where, row, num_bytes in _rows(path):
        rows += 1
        problems = [row] if isinstance(row, Problem) else list(CHECKS[row_format](row))
        num_problems += len(problems)
        bad += bool(problems)
        room = max(0, request.max_problems - len(listed))
        listed += [_located(problem, where) for problem in problems[:room]]
        if isinstance(row, dict) and not problems:
            survey.add(row, num_bytes)
    return ValidationReport(
        path=workspace.shown(path),
        format=row_format,
        rows=rows,
        good=rows - bad,
        bad=bad,
        num_problems=num_problems,
        problems=listed,
        duplicates=survey.duplicates,
        messages=quantiles(survey.messages),
        characters=quantiles(survey.characters),
        rewards=quantiles(survey.rewards),
        categories=dict(survey.categories.most_common(50)),
        layouts=dict(sorted(survey.layouts.items())),
        failed=survey.failed,
        success_unknown=survey.success_unknown,
    )


def quantiles(values: list[float]) -> Quantiles | None:
    """Returns a distribution in five numbers; None of no values."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Quantiles(
        low=ordered[0],
        median=at(0.5),
        p95=at(0.95),
        high=ordered[-1],
        mean=sum(ordered) / len(ordered),
    )


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | Problem, int]]:
    for file in rollout_files(path):
        for line in read_row_lines(file):
            where = f"{file}:{line.number}"
            decode = decode_text_line if file.suffix == ".txt" else decode_line
            yield where, decode(line), line.num_bytes


def _format_of(path: Path, wanted: str) -> RowFormat:
    empty = True
    for _, row, _ in _rows(path):
        empty = False
        if wanted != "auto":
            return RowFormat(wanted)
        detected = detect_format(row) if isinstance(row, dict) else None
        if detected is not None:
            return detected
    if empty:
        raise DataError(f"{path} holds no rows", "write one JSON object per line")
    raise DataError(
        f"no row of {path} is a prompt, a rollout, an SFT row or a preference pair",
        "give `format`, and every problem will be listed",
    )


def _conversation(row: dict[str, Any], row_format: RowFormat) -> list[Any]:
    """Returns all messages of a row without problems."""
    if row_format is RowFormat.DPO:
        return [*row["prompt"], *row["chosen"], *row["rejected"]]
    if row_format is RowFormat.PROMPTS:
        return list(task_from_row(row).messages)
    return row["messages"]


def _metadata(row: dict[str, Any], row_format: RowFormat) -> dict[str, Any]:
    if row_format is RowFormat.PROMPTS:
        return task_from_row(row).metadata
    return row.get("metadata") or {}


def _located(problem: Problem, where: str) -> RowProblem:
    return RowProblem(where=where, field=problem.field, problem=problem.message, fix=problem.fix)

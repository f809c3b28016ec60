"""The conversation format that a model was trained on: its system message and tools."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.data.instruction import RemovedSystem
from stillroom.data.row_files import read_row_lines
from stillroom.export.provenance import file_with_content
from stillroom.files import content_hash
from stillroom.lineage import FileRecord
from stillroom.settings import Workspace

MAX_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class TrainedConversation:
    """The system messages and tools of the first 20,000 training rows."""

    num_rows: int
    systems: Counter[str]
    """The number of rows with each system message; `""` means none."""
    tools: Counter[bytes]
    """The number of rows with each list of tool schemas (JSON); `[]` means none."""
    removed: Counter[RemovedSystem] = field(default_factory=Counter[RemovedSystem])
    """The number of rows by the removed system message, which only their teacher read."""
    rollout_ids: frozenset[str] = frozenset()
    """The ids of the rollouts behind the rows, if the rows name them."""

    @property
    def system(self) -> str | None:
        """The most frequent system message, or None if most rows have none."""
        return self.systems.most_common(1)[0][0] or None

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The most frequent list of tools; [] if most rows have none."""
        return msgspec.json.decode(self.tools.most_common(1)[0][0])


@dataclass(frozen=True, slots=True)
class EvaluatedConversation:
    """The beginning of an evaluation's prompts, according to its rollouts."""

    system: str | None
    """The system message of all prompts (`""` means none); None if they differ."""
    questions: str
    """A hash of the prompts without their system messages."""


def trained_conversation(workspace: Workspace, rows: FileRecord) -> TrainedConversation | None:
    """Returns the conversation format of training rows; None if the rows no longer exist."""
    path = file_with_content(workspace, rows)
    if path is None:
        return None
    systems, tools = Counter[str](), Counter[bytes]()
    removed, rollout_ids = Counter[RemovedSystem](), set[str]()
    for row in itertools.islice(_rows(path), MAX_ROWS):
        systems[_system(row) or ""] += 1
        if (instruction := _removed_system(row)) is not None:
            removed[instruction] += 1
        tools[msgspec.json.encode(_schemas(row))] += 1
        if isinstance(rollout_id := row.get("rollout_id"), str):
            rollout_ids.add(rollout_id)
    total = systems.total()
    if not total:
        return None
    return TrainedConversation(total, systems, tools, removed, frozenset(rollout_ids))


def evaluated_conversation(rollouts: Path) -> EvaluatedConversation | None:
    """Returns the beginning of an evaluation's prompts; None if its rollouts no longer exist."""
    systems, questions = set[str](), set[str]()
    try:
        for row in itertools.islice(_rows(rollouts), MAX_ROWS):
            systems.add(_system(row) or "")
            first = (message for message in _messages(row) if message.get("role") == "user")
            questions.add(content_hash(next(first, {}).get("content")))
    except OSError:
        return None
    system = systems.pop() if len(systems) == 1 else None
    return EvaluatedConversation(system, content_hash(sorted(questions))) if questions else None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file that are JSON objects."""
    for line in read_row_lines(path):
        try:
            row: Any = msgspec.json.decode(line.data)
        except (msgspec.DecodeError, RecursionError):
            continue  # training refused or skipped this row
        if isinstance(row, dict):
            yield cast("dict[str, Any]", row)


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a supervised row or rollout, or the prompt of a pair or task."""
    value: Any = row.get("messages") or row.get("prompt")
    messages: list[Any] = value if isinstance(value, list) else [{"role": "user", "content": value}]
    return [message for message in messages if isinstance(message, dict)]


def _system(row: dict[str, Any]) -> str | None:
    """Returns the system message of a row; None if it does not begin with one."""
    first = next(iter(_messages(row)), {})
    content = first.get("content") if first.get("role") == "system" else None
    return content if isinstance(content, str) else None


def _removed_system(row: dict[str, Any]) -> RemovedSystem | None:
    """Returns the record of the system message that was removed from a row; None without one."""
    try:
        return msgspec.convert(row.get("removed_system"), RemovedSystem | None)
    except msgspec.ValidationError:
        return None  # a field of the same name that the user added


def _schemas(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the schemas of a row's tools; prompts have only the names of tools."""
    value: Any = row.get("tools")
    tools: list[Any] = value if isinstance(value, list) else []
    return [tool for tool in tools if isinstance(tool, dict) and "function" in tool]

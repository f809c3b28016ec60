"""Statistics of the rows of a data file that have no problems, collected row by row."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from stillroom import fences
from stillroom.data.checks import as_number
from stillroom.data.distribution import Distribution
from stillroom.data.formats import RowFormat, task_from_row
from stillroom.data.layouts.detect import RolloutLayout, as_rollout, layout_of
from stillroom.data.row_names import HashSet
from stillroom.data.row_notes import calls_tools, has_later_system
from stillroom.files import canonical_json

_MAX_SAMPLED = 1000
"""The number of rows in the random sample whose tokens are counted."""


class RowPosition(msgspec.Struct, frozen=True, array_like=True):
    """The position of a row: its file, and its bytes in that file."""

    path: str
    offset: int
    num_bytes: int


class DatasetStatistics:
    """Statistics of rows without problems: distributions, categories, duplicates, a sample."""

    def __init__(self, row_format: RowFormat, category_field: str) -> None:
        self._format, self._category_field = row_format, category_field
        self._seen_conversations, self._seen_rows = HashSet(), HashSet()
        self._rng = random.Random(0)
        self.duplicates = self.copies = 0
        self.messages, self.turns = Distribution(), Distribution()
        self.characters, self.rewards = Distribution(), Distribution()
        self.categories: Counter[str] = Counter()
        self.uncategorized = 0
        self.fields: set[str] = set()
        """The metadata fields of rows without a category."""
        self.layouts: Counter[str] = Counter()
        self.failed = self.success_unknown = 0
        self.num_rows = self.without_tools = self.later_system = 0
        self.sampled: list[RowPosition] = []

    def add(self, row: dict[str, Any], position: RowPosition, row_hash: int) -> None:
        """Adds one row, which must have no problems; `row_hash` is a 64-bit hash of its bytes."""
        if self._format is RowFormat.ROLLOUTS:
            self.layouts[layout_of(row) or RolloutLayout.STILLROOM] += 1
            row = as_rollout(row)
            self.failed += row.get("error") is not None
            self.success_unknown += row.get("success") is None and row.get("error") is None
        messages = _conversation_of(row, self._format)
        metadata = _metadata(row, self._format)
        self._count_duplicate([messages, metadata], row_hash)
        self.num_rows += 1
        is_trained = self._format is not RowFormat.PROMPTS
        self.without_tools += is_trained and not row.get("tools") and calls_tools(messages)
        self.later_system += has_later_system(message["role"] for message in messages)
        self.messages.add(len(messages))
        self.turns.add(sum(message.get("role") == "assistant" for message in messages))
        self.characters.add(sum(map(_num_characters, messages)))
        if (reward := as_number(row.get("reward"))) is not None:
            self.rewards.add(reward)
        category = category_in(metadata, self._category_field)
        if category is None:
            self.uncategorized += 1
            self.fields.update(metadata)
        else:
            self.categories[category] += 1
        if messages:  # A rollout that failed before its first message has no tokens to count.
            self._sample(position)

    def _count_duplicate(self, conversation: Any, row_hash: int) -> None:
        digest = hashlib.blake2b(canonical_json(conversation), digest_size=8).digest()
        self.duplicates += not self._seen_conversations.add(int.from_bytes(digest))
        self.copies += not self._seen_rows.add(row_hash)

    def _sample(self, position: RowPosition) -> None:
        """Adds a row to the random sample (reservoir sampling)."""
        if len(self.sampled) < _MAX_SAMPLED:
            self.sampled.append(position)
        elif (slot := self._rng.randrange(self.num_rows)) < _MAX_SAMPLED:
            self.sampled[slot] = position


def _conversation_of(row: dict[str, Any], row_format: RowFormat) -> list[Any]:
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


def _num_characters(message: dict[str, Any]) -> int:
    """Returns the number of characters in the texts and calls of a message."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    calls = message.get("tool_calls") or []
    return sum(len(str(part.get("text", ""))) for part in parts) + sum(
        len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in calls
    )


_MAX_FIELDS = 20


def missing_field_note(field: str, existing: Iterable[str]) -> str:
    """Returns a note that no row has a metadata field; `existing` are the fields that rows have."""
    names = sorted(set(existing))
    shown = ", ".join(map(fences.safe_name, names[:_MAX_FIELDS])) or "none"
    more = ", …" if len(names) > _MAX_FIELDS else ""
    return f"no row has the metadata field {field}; the fields that rows have: {shown}{more}"


_VERIFIER_METADATA = "verifier_metadata"
"""The field in which rows of NeMo Gym have the metadata of the task."""


def category_in(metadata: Mapping[str, Any], field: str) -> str | None:
    """Returns a row's category, a metadata field as text; None if it has none.

    If no field has the name, dots in it are a path (`a.b` is field b of the object a), which may
    also start in `verifier_metadata`.
    """
    value = metadata.get(field)
    if value is None:
        value = _nested_value(metadata, field.split("."))
    if value is None:
        value = _nested_value(metadata, [_VERIFIER_METADATA, *field.split(".")])
    return None if value is None else str(value)


def _nested_value(value: Any, names: list[str]) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value

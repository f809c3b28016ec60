"""Finds candidates for preference pairs: which rollouts of a task to pair, and where they differ.

For each rollout, only its reward and its location in the file are held in memory.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from stillroom.curate.facts import NULL
from stillroom.curate.rows import read_curated_rows, translate, without_ids
from stillroom.data.row_files import RowReader
from stillroom.data.row_names import row_hash
from stillroom.errors import DataError
from stillroom.types import is_trained_turn

Strategy = Literal["best_worst", "all", "adjacent"]
_MAX_CACHE_BYTES = 16 << 20


class IndexedRollout(msgspec.Struct, frozen=True, gc=False):
    """The location of a rollout in its file, its reward, and how to read its messages."""

    path: Path
    offset: int
    num_bytes: int
    reward: float
    is_translated: bool
    """Whether the line must be translated to Stillroom's layout when it is read again."""


TaskIndex = dict[str, list[IndexedRollout]]


def index_rollouts(files: Iterable[Path], skipped: Counter[str]) -> TaskIndex:
    """Returns the rollouts that can take part in a pair, by task id.

    Each row that cannot take part is counted in `skipped`, by the reason.
    """
    index: TaskIndex = {}
    for rollout in itertools.chain.from_iterable(map(read_curated_rows, files)):
        facts = rollout.facts
        if facts is None or rollout.layout is None or facts.task_id is None:
            skipped["not a rollout row"] += 1
        elif facts.reward is None:
            skipped["rollout without a reward"] += 1
        elif facts.num_turns == 0:
            skipped["rollout without an assistant message"] += 1
        else:
            line = rollout.line
            is_translated = rollout.translated is not None
            entry = IndexedRollout(
                rollout.path, line.offset, line.num_bytes, facts.reward, is_translated
            )
            index.setdefault(facts.task_id, []).append(entry)
    return index


def ranked_pairs(
    better: Sequence[IndexedRollout],
    worse: Sequence[IndexedRollout],
    strategy: Strategy,
    *,
    min_difference: float,
) -> Iterator[tuple[IndexedRollout, IndexedRollout]]:
    """Yields (chosen, rejected) pairs, the largest difference in reward first.

    Pairs with a difference below `min_difference` are left out. The memory needed grows with the
    number of rollouts of the task, not with the number of its pairs.
    """
    best_first = sorted(better, key=lambda entry: -entry.reward)
    worst_first = sorted(worse, key=lambda entry: entry.reward)
    match strategy:
        case "best_worst":
            pairs = iter([(best_first[0], worst_first[0])])
        case "adjacent":
            neighbours = list(itertools.pairwise(best_first))
            pairs = iter(sorted(neighbours, key=_difference, reverse=True))
        case "all":
            pairs_by_chosen = [
                zip(itertools.repeat(chosen), worst_first, strict=False) for chosen in best_first
            ]
            pairs = heapq.merge(*pairs_by_chosen, key=_difference, reverse=True)
    return itertools.takewhile(lambda pair: _difference(pair) >= min_difference, pairs)


def _difference(pair: tuple[IndexedRollout, IndexedRollout]) -> float:
    return pair[0].reward - pair[1].reward


class PairedRollout(msgspec.Struct, frozen=True):
    """The fields of a rollout that go into a pair, as undecoded bytes of its line."""

    messages: list[msgspec.Raw]
    tools: msgspec.Raw | bytes
    metadata: msgspec.Raw | bytes
    name: str
    recorded_model: str | None
    """The model that answered, if another system wrote the rollout and names the model."""


class _Teacher(msgspec.Struct, frozen=True):
    model: str | None = None


class _Fields(msgspec.Struct, frozen=True):
    messages: list[msgspec.Raw]
    tools: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL


class _TranslatedFields(_Fields, frozen=True):
    teacher: _Teacher | None = None


_TRANSLATED = msgspec.json.Decoder(_TranslatedFields)
_FIELDS = msgspec.json.Decoder(_Fields)


class PairReader:
    """Reads the indexed rollouts of a task, with their names, and caches up to 16 MB of them."""

    def __init__(self) -> None:
        self._rows = RowReader()
        # The task's rollouts by file and length, among which equal rows are found.
        self._same_size: dict[tuple[Path, int], list[IndexedRollout]] = {}
        self._cache: dict[IndexedRollout, PairedRollout] = {}
        self._cached_bytes = 0

    def begin_task(self, rollouts: Iterable[IndexedRollout]) -> None:
        """Empties the cache. `rollouts` are all of the next task's rollouts, better and worse."""
        self._cache.clear()
        self._cached_bytes = 0
        self._same_size.clear()
        for entry in rollouts:
            self._same_size.setdefault((entry.path, entry.num_bytes), []).append(entry)

    def read(self, entry: IndexedRollout) -> PairedRollout:
        """Returns the fields of a rollout that a pair needs.

        Raises DataError if the line cannot be decoded, because the file has changed.
        """
        rollout = self._cache.get(entry)
        if rollout is None:
            rollout = self._read(entry)
            if self._cached_bytes + entry.num_bytes <= _MAX_CACHE_BYTES:
                self._cache[entry] = rollout
                self._cached_bytes += entry.num_bytes
        return rollout

    def _read(self, entry: IndexedRollout) -> PairedRollout:
        """Reads a rollout from its file."""
        data = self._rows.read(entry.path, entry.offset, entry.num_bytes)
        try:
            row = (
                _TRANSLATED.decode(translate(data) or data)
                if entry.is_translated
                else _FIELDS.decode(data)
            )
        except msgspec.DecodeError as error:
            raise DataError(
                f"{entry.path} changed while it was read",
                "wait until nothing is writing to it any more, then make the pairs again",
            ) from error
        return PairedRollout(
            messages=row.messages,
            tools=b"[]" if row.tools == NULL else row.tools,
            metadata=b"{}" if row.metadata == NULL else row.metadata,
            name=f"{row_hash(data)}#{self._number(entry, data)}",
            recorded_model=(
                row.teacher.model
                if isinstance(row, _TranslatedFields) and row.teacher is not None
                else None
            ),
        )

    def _number(self, entry: IndexedRollout, data: bytes) -> int:
        """Returns the number of a rollout among the equal rows of its file, as RowNames counts it.

        Equal rows have the same task, so it compares only rows of this task with the same length.
        """
        earlier = {
            other.offset
            for other in self._same_size[entry.path, entry.num_bytes]
            if other.offset < entry.offset
        }
        rows = (self._rows.read(entry.path, offset, entry.num_bytes) for offset in earlier)
        return 1 + sum(row == data for row in rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._rows.__exit__(*error)


def first_difference(first: Sequence[msgspec.Raw], second: Sequence[msgspec.Raw]) -> int | None:
    """Returns the index of the first message that differs; None if the conversations are equal.

    The ids of tool calls and the weights of messages are ignored.
    """
    for index, (message, counterpart) in enumerate(zip(first, second, strict=False)):
        if message != counterpart and _comparable(message) != _comparable(counterpart):
            return index
    shorter = min(len(first), len(second))
    return shorter if len(first) != len(second) else None


def _comparable(message: msgspec.Raw) -> dict[str, Any]:
    plain = without_ids(msgspec.json.decode(message))
    return {key: value for key, value in plain.items() if key != "weight"}


def both_answer(first: Sequence[msgspec.Raw], second: Sequence[msgspec.Raw], index: int) -> bool:
    """Returns whether both conversations have an assistant message at `index`."""
    return all(
        len(m) > index and _comparable(m[index])["role"] == "assistant" for m in (first, second)
    )


def has_trained_turn(messages: Sequence[msgspec.Raw]) -> bool:
    """Returns whether one of the assistant messages is trained, i.e. has no weight of 0."""
    decoded = (msgspec.json.decode(message) for message in messages)
    return any(m["role"] == "assistant" and is_trained_turn(m) for m in decoded)

"""Splits rollouts into a training and a held-out part without overlap."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stillroom.data.near_duplicates import (
    MinHasher,
    NearDuplicates,
    cluster_of,
    merge_clusters,
)
from stillroom.data.words import shingles_of, user_and_assistant_text, user_texts, words_of
from stillroom.files import content_hash
from stillroom.importing.conversations.rollouts import JoinedRows, RolloutBuilder
from stillroom.importing.payloads.fields import iso_seconds

_SAMPLE_SIZE = 400
"""The number of texts that are sampled to find shared shingles."""
_SHARED_FRACTION, _MIN_SHARED_TEXTS = 0.2, 5
"""A shingle is shared if this fraction of the texts, and at least this many, have it."""
_TextAt = Callable[[int], str]
"""Returns the text of the rollout with this index."""


@dataclass(frozen=True, slots=True)
class Split:
    """The held-out rollouts, by kept row."""

    heldout: frozenset[int]
    num_heldout_families: int
    by: str
    """`time` if the newest families are held out; `hash` if times are unknown."""
    notes: list[str] = field(default_factory=list[str])


def split_rollouts(joined: JoinedRows, builder: RolloutBuilder, *, share: float) -> Split:
    """Holds out whole families of rollouts, up to a share of all rollouts.

    A family is a set of rollouts that share a group, branch from one another, have the same opening
    or are near duplicates. The newest families are held out if all times are known, else those with
    the lowest hash of their user messages.
    Raises MissingExtraError if the library that finds near duplicates is not installed.
    """
    texts = _Texts(joined.kept, builder)
    families, times = _link_families(joined, texts)
    num_rollouts = len(joined.kept)
    for text_at in (texts.questions, texts.turns):
        for index, first in enumerate(_near_clusters(num_rollouts, text_at)):
            merge_clusters(families, index, first)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(num_rollouts):
        members[cluster_of(families, index)].append(index)
    known_times = [time for time in times if time is not None]
    is_by_time = len(known_times) == num_rollouts and len(set(known_times)) > 1

    def rank(family: list[int]) -> tuple[float, str]:
        newest = max(times[index] or 0.0 for index in family) if is_by_time else 0.0
        return -newest, content_hash(texts.questions(family[0]))

    ordered = sorted(members.values(), key=rank)
    chosen = _select_families(ordered, num_rollouts, share)
    heldout = frozenset(joined.kept[index] for family in chosen for index in family)
    notes = _notes(len(heldout), num_rollouts, share, max(map(len, ordered)))
    return Split(heldout, len(chosen), "time" if is_by_time else "hash", notes)


def _select_families(
    ordered: Sequence[list[int]], num_rollouts: int, share: float
) -> list[list[int]]:
    """Returns the first families that fit into the share (at least one rollout), but never all."""
    max_heldout = max(1, round(share * num_rollouts))
    selected: list[list[int]] = []
    num_selected = 0
    for family in ordered:
        if num_selected + len(family) <= max_heldout and num_selected + len(family) < num_rollouts:
            selected.append(family)
            num_selected += len(family)
    return selected


def _notes(num_heldout: int, num_rollouts: int, share: float, largest: int) -> list[str]:
    """Returns a note if less than half of the requested share is held out."""
    if num_heldout >= 0.5 * share * num_rollouts:
        return []
    note = (
        f"only {num_heldout} of {num_rollouts} rollouts are held out: related rollouts stay "
        f"together, and the largest family has {largest}"
    )
    return [note]


class _Texts:
    """The texts of the rollouts by their index, built on demand."""

    def __init__(self, kept: Sequence[int], builder: RolloutBuilder) -> None:
        self._kept, self._builder = kept, builder

    def opening(self, index: int) -> str:
        """Returns the words of the first user message, joined by spaces."""
        texts = user_texts(self._messages(index))
        return " ".join(words_of(texts[0])) if texts else ""

    def questions(self, index: int) -> str:
        """Returns the text of all user messages."""
        return "\n".join(user_texts(self._messages(index)))

    def turns(self, index: int) -> str:
        """Returns the text of all user and assistant messages."""
        return user_and_assistant_text(self._messages(index))

    def group_and_time(self, index: int) -> tuple[str | None, float | None]:
        """Returns a rollout's group, and the start of its last call in seconds since 1970."""
        kept = self._builder.build(self._kept[index]).kept
        return kept.group, iso_seconds(kept.started_at)

    def _messages(self, index: int) -> list[dict[str, Any]]:
        return msgspec.json.decode(self._builder.build(self._kept[index]).messages_json)


def _link_families(joined: JoinedRows, texts: _Texts) -> tuple[list[int], list[float | None]]:
    """Returns each rollout's family, by branch, group and opening, and each rollout's time."""
    families = list(range(len(joined.kept)))
    index_of = {row: index for index, row in enumerate(joined.kept)}
    for row, main in joined.branch_of.items():
        merge_clusters(families, index_of[row], index_of[main])
    first_with: dict[Hashable, int] = {}
    times: list[float | None] = []
    for index in range(len(joined.kept)):
        group, time = texts.group_and_time(index)
        times.append(time)
        for key in (("group", group), ("opening", texts.opening(index))):
            if key[1]:
                merge_clusters(families, first_with.setdefault(key, index), index)
    return families, times


def _near_clusters(num_texts: int, text_at: _TextAt) -> list[int]:
    """Returns each text's near-duplicate cluster, numbered by the cluster's first text."""
    shared = _shared_shingles(num_texts, text_at)

    def rare_shingles(index: int) -> frozenset[str]:
        shingles = shingles_of(text_at(index))
        return shingles - shared or shingles

    signer, finder = MinHasher(), NearDuplicates()
    for index in range(num_texts):
        # Rollouts without a text are no duplicates of one another.
        text = text_at(index) or f"(rollout {index})"
        finder.add(signer.signature(text, rare_shingles(index)), quality=0.0, tie_breaker=b"")
    return finder.clusters(rare_shingles)


def _shared_shingles(num_texts: int, text_at: _TextAt) -> frozenset[str]:
    """Returns the shingles that many texts share, such as instructions that an app adds to all.

    With these, any two prompts of the app would be near duplicates.
    """
    step = max(1, num_texts // _SAMPLE_SIZE)
    sample = {text_at(index) for index in range(0, num_texts, step)}
    counts = Counter(shingle for text in sample for shingle in shingles_of(text))
    min_count = max(_MIN_SHARED_TEXTS, _SHARED_FRACTION * len(sample))
    return frozenset(shingle for shingle, count in counts.items() if count >= min_count)

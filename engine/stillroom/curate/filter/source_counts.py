"""Counts kept and dropped rows by the file that they come from."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.curate.filter.request import SourceFilterCount
from stillroom.curate.rows import OTHERS

_MAX_SOURCES = 20


@dataclass(slots=True)
class SourceCounts:
    """The numbers of kept and of dropped rows by source."""

    kept: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])

    def add(self, source: str, *, is_kept: bool) -> None:
        """Counts one row of a source."""
        (self.kept if is_kept else self.dropped)[source] += 1

    def merge(self, other: "SourceCounts") -> None:
        """Adds the counts of another object, which counted other rows."""
        self.kept.update(other.kept)
        self.dropped.update(other.dropped)

    def by_name(self, shown_path: Callable[[Path], str]) -> dict[str, SourceFilterCount]:
        """Returns the counts of the 20 largest sources and of all others; {} for a single source.

        `shown_path` returns an absolute path as results show it. The source of imported rows is a
        relative path, which is used unchanged.
        """
        total = self.kept + self.dropped
        if len(total) < 2:
            return {}
        largest = sorted(source for source, _ in total.most_common(_MAX_SOURCES))
        counts = {
            shown_path(Path(name)) if Path(name).is_absolute() else name: self._count([name])
            for name in largest
        }
        if others := total.keys() - set(largest):
            counts[OTHERS] = self._count(others)
        return counts

    def _count(self, sources: "list[str] | set[str]") -> SourceFilterCount:
        return SourceFilterCount(
            kept=sum(self.kept[source] for source in sources),
            dropped=sum(self.dropped[source] for source in sources),
        )

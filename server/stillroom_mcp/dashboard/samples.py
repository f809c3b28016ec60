"""What a file of rows holds, from rows spread evenly over it."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from stillroom.data.formats import RowFormat
from stillroom.data.statistics import DatasetStatistics, RowPlace
from stillroom.report.data_pages import CategoryShare, category_shares, dataset_charts
from stillroom.report.drawing import BarChart
from stillroom_mcp.dashboard.row_files import RowFiles
from stillroom_mcp.dashboard.rows import decoded

_MOST_ROWS = 2000
_STRETCH = 20
"""The number of neighbouring rows that are read at each place."""
_MOST_KEPT = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """The distributions of a file's rows."""

    format: str
    num_rows: int
    num_sampled: int
    num_good: int
    outcomes: Sequence[tuple[str, int]]
    charts: Sequence[BarChart]
    categories: Sequence[CategoryShare]


class Samples:
    """The distributions of files, each kept until its file changes."""

    def __init__(self, files: RowFiles) -> None:
        self._files = files
        self._kept: OrderedDict[tuple[Path, int, int], Sample] = OrderedDict()
        self._lock = Lock()

    def sample(self, path: Path) -> Sample:
        """Returns the distributions of a file, from at most two thousand of its rows."""
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = _read_sample(self._files, path)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]


def _read_sample(files: RowFiles, path: Path) -> Sample:
    total = files.count(path)
    num_places = max(1, _MOST_ROWS // _STRETCH)
    is_whole = total <= _MOST_ROWS
    starts = [0] if is_whole else [place * total // num_places for place in range(num_places)]
    row_format: RowFormat | None = None
    statistics: DatasetStatistics | None = None
    outcomes = {"right": 0, "wrong": 0, "not judged": 0}
    sampled = good = 0
    for start in starts:
        for line in files.read(path, start, total if is_whole else _STRETCH):
            sampled += 1
            found = decoded(line.data, path.suffix)
            if isinstance(found, str) or (row_format not in (None, found[0])):
                continue
            row_format, row = found
            statistics = statistics or DatasetStatistics(row_format, "task_type")
            good += 1
            statistics.add(row, RowPlace("", line.offset, len(line.data)), line.offset)
            success = row.get("success")
            known = {True: "right", False: "wrong"}
            outcomes[known[success] if isinstance(success, bool) else "not judged"] += 1
    is_rollouts = row_format is RowFormat.ROLLOUTS
    return Sample(
        format=row_format or "unknown",
        num_rows=total,
        num_sampled=sampled,
        num_good=good,
        outcomes=list(outcomes.items()) if is_rollouts else (),
        charts=list(dataset_charts(row_format, statistics)) if statistics and row_format else (),
        categories=category_shares(statistics) if statistics else (),
    )

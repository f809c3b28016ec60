"""A comparison of all evaluations: a table, and bars with 95 % intervals."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.evaluate.costs import CostComparison
from stillroom.evaluate.files import EvaluationResult, other_measures
from stillroom.evaluate.intervals import Estimate
from stillroom.report.lineup import EvaluationEntry, Lineup, Role
from stillroom.report.wording import Interval, count, percent_interval, plural, short_name

MAX_ROWS = 24
MAX_BARS = 8
MAX_GROUPS = 8

_PREFERRED_FIELDS = ("difficulty", "expected_answer")
_LEVEL_RANKS = {"trivial": 0, "easy": 1, "medium": 2, "normal": 2, "hard": 3, "expert": 4}


@dataclass(frozen=True, slots=True)
class AccuracyBar:
    """The bar of one evaluation's accuracy; positions are percentages of the width."""

    label: str
    role: Role
    accuracy: Interval
    width: float
    low: float | None
    high: float | None
    description: str


@dataclass(frozen=True, slots=True)
class Panel:
    """The bars for all tasks, or for one group of tasks."""

    title: str
    note: str
    bars: Sequence[AccuracyBar]


@dataclass(frozen=True, slots=True)
class ScoreboardRow:
    """One evaluation in the table."""

    entry: EvaluationEntry
    role: Role
    groups: Sequence[Estimate | None]
    """The accuracy in each group of the table."""
    teacher: str | None
    """The teacher of the KL, if the rows of the table have several teachers."""
    other_measures: Sequence[str] = ()
    """Short descriptions of the other measurements."""


@dataclass(frozen=True, slots=True)
class Scoreboard:
    """The table and bars of all evaluations, or of the most important ones if there are many."""

    rows: Sequence[ScoreboardRow]
    panels: Sequence[Panel]
    group_field: str | None
    groups: Sequence[str]
    notes: Sequence[str]
    """Notes that explain the table."""


def scoreboard(lineup: Lineup, costs: CostComparison | None = None) -> Scoreboard:
    """Returns the table and the bars of the evaluations, with a note on `costs`."""
    rows, entries_with_bars = lineup.most_important(MAX_ROWS), lineup.most_important(MAX_BARS)
    results = [entry.evaluation.result for entry in rows]
    field = _group_field(results)
    values = _group_values(results, field) if field else []
    by_file = defaultdict[str, list[EvaluationEntry]](list)
    for entry in entries_with_bars:
        by_file[entry.evaluation.result.data].append(entry)
    names = {data: Path(data).name for data in by_file}
    if len(set(names.values())) < len(names):
        names = {data: data for data in by_file}
    # Accuracies on other tasks say nothing about each other.
    panels = [
        _panel(
            "All tasks" if len(by_file) == 1 else names[data],
            lineup,
            [(entry, entry.evaluation.result.accuracy) for entry in entries],
        )
        for data, entries in by_file.items()
    ]
    # Groups are shown for the file with the most evaluations that have groups.
    grouped = max(
        by_file.values(),
        key=lambda entries: sum(field in entry.evaluation.result.by_group for entry in entries),
        default=[],
    )
    title_suffix = f" in {names[grouped[0].evaluation.result.data]}" if len(by_file) > 1 else ""
    values_in_file = [v for v in values if any(_group_accuracy(e, field, v) for e in grouped)]
    groups = values_in_file[:MAX_GROUPS]
    for group in groups:
        members = [(entry, _group_accuracy(entry, field, group)) for entry in grouped]
        title = f"{short_name(group)}{title_suffix}"
        panels.append(_panel(title, lineup, [(e, a) for e, a in members if a is not None]))
    return Scoreboard(
        rows=[_row(entry, lineup, field, groups) for entry in rows],
        panels=[panel for panel in panels if panel.bars],
        group_field=field,
        groups=[short_name(group) for group in groups],
        notes=[
            *_notes(lineup, results, entries_with_bars, len(values)),
            *([costs.sentence] if costs else []),
        ],
    )


def _panel(
    title: str, lineup: Lineup, members: Sequence[tuple[EvaluationEntry, Estimate]]
) -> Panel:
    sizes = sorted({accuracy.n for _, accuracy in members})
    tasks = " or ".join(count(size) for size in sizes[:3]) + " tasks"
    bars = [_bar(entry, lineup.role(entry), accuracy) for entry, accuracy in members]
    return Panel(title, plural(1, "task") if sizes == [1] else tasks, bars)


def _bar(entry: EvaluationEntry, role: Role, accuracy: Estimate) -> AccuracyBar:
    interval = percent_interval(accuracy)
    range_text = f", 95 % interval {interval.range}" if interval.range else ""
    return AccuracyBar(
        label=entry.label,
        role=role,
        accuracy=interval,
        width=_position(accuracy.value),
        low=None if accuracy.low is None else _position(accuracy.low),
        high=None if accuracy.high is None else _position(accuracy.high),
        description=f"{entry.label}: {interval.value}{range_text}, {plural(accuracy.n, 'task')}",
    )


def _position(share: float) -> float:
    return round(100 * min(1.0, max(0.0, share)), 2)


def _row(
    entry: EvaluationEntry, lineup: Lineup, field: str | None, groups: Sequence[str]
) -> ScoreboardRow:
    has_several_teachers = len({e.evaluation.result.teacher for e in lineup.entries} - {None}) > 1
    return ScoreboardRow(
        entry=entry,
        role=lineup.role(entry),
        groups=[_group_accuracy(entry, field, group) for group in groups],
        teacher=entry.evaluation.result.teacher if has_several_teachers else None,
        other_measures=list(other_measures(entry.evaluation.result)),
    )


def _group_accuracy(entry: EvaluationEntry, field: str | None, group: str) -> Estimate | None:
    return entry.evaluation.result.by_group.get(field or "", {}).get(group)


def _group_field(results: Sequence[EvaluationResult]) -> str | None:
    """Returns the metadata field by which the table groups tasks; None without groups."""
    fields = [field for result in results for field in result.by_group]
    preferred = (field for field in _PREFERRED_FIELDS if field in fields)
    return next(preferred, next(iter(fields), None))


def _group_values(results: Sequence[EvaluationResult], field: str) -> list[str]:
    values = {value for result in results for value in result.by_group.get(field, {})}
    return sorted(values, key=_sort_key)


def _sort_key(value: str) -> tuple[float, str]:
    """Returns a sort key for groups: numbers by value, and levels such as easy by difficulty."""
    if value.isdecimal():
        return float(value), value
    return float(_LEVEL_RANKS.get(value.lower(), 9)), value


def _notes(
    lineup: Lineup,
    results: Sequence[EvaluationResult],
    entries_with_bars: Sequence[EvaluationEntry],
    num_groups: int,
) -> list[str]:
    notes: list[str] = []
    if len({result.data for result in results}) > 1:
        notes.append("The evaluations use different files: compare only rows with the same data.")
    if len(results) < len(lineup.entries):
        num_hidden = len(lineup.entries) - len(results)
        notes.append(
            f"{plural(num_hidden, 'older evaluation')} not shown in the table; see All runs."
        )
    if len(entries_with_bars) < len(results):
        notes.append(
            f"The bars show {len(entries_with_bars)} of {len(lineup.entries)} evaluations."
        )
    if num_groups > MAX_GROUPS:
        notes.append(f"{num_groups - MAX_GROUPS} more groups are not shown.")
    return notes

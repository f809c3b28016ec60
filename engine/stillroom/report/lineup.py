"""Who was evaluated, in which order, and what each one is to the others: first, best, teacher."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from stillroom.evaluate.compare import compare
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.report.charts.curves import Settings
from stillroom.report.folders import FolderReader, Run
from stillroom.report.wording import short_name
from stillroom.types import RunKind, RunStatus

Role = Literal["first", "best", "teacher", "other"]

MIN_SHARED = 2
"""Tasks that two evaluations must share to be compared."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One evaluation in the report."""

    run: Run
    evaluation: Evaluation
    label: str
    """The evaluation's name, shortened, and numbered where it comes again."""
    is_teacher: bool


@dataclass(frozen=True, slots=True)
class Lineup:
    """All evaluations, oldest first, and those the report speaks about."""

    entries: Sequence[Entry]
    before: Entry | None
    """The earliest of a model that is no teacher."""
    after: Entry | None
    """The latest that answered the same tasks as `before`."""
    best: Entry | None
    """The most accurate of `num_rivals` that answered the same tasks as `before`."""
    num_rivals: int
    teacher: Entry | None

    def role(self, entry: Entry) -> Role:
        """Returns what an entry is to the others."""
        if entry.is_teacher:
            return "teacher"
        if len(self.entries) > 1 and entry is self.before:
            return "first"
        return "best" if entry is self.best else "other"

    def foremost(self, limit: int) -> list[Entry]:
        """Returns at most `limit` entries, oldest first: those spoken about and the newest."""
        named = [self.before, self.teacher, self.best, self.after]
        chosen = [entry for entry in self.entries if any(entry is one for one in named)]
        others = [entry for entry in self.entries if all(entry is not one for one in chosen)]
        kept = {e.run.run_id for e in [*chosen, *reversed(others)][:limit]}
        return [entry for entry in self.entries if entry.run.run_id in kept]


class _RolloutsRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    request: _RolloutsRequest = _RolloutsRequest()


def read_lineup(
    reader: FolderReader, runs: Sequence[Run], settings: Mapping[str, Settings]
) -> Lineup:
    """Returns the finished evaluations among the runs."""
    found: list[tuple[Run, Evaluation]] = []
    for run in runs:
        if run.state.kind is RunKind.EVALUATE:
            is_finished = run.state.status is RunStatus.SUCCEEDED
            path = run.folder / RESULT_FILE
            evaluation = reader.document(path, Evaluation, is_required=is_finished)
            if evaluation is not None:
                found.append((run, evaluation))
    scorers = {evaluation.result.teacher for _, evaluation in found if evaluation.result.teacher}
    teachers = scorers | _teachers_of_runs(reader, runs, settings)
    labels = _labels([evaluation.result.name for _, evaluation in found])
    return line_up(
        [
            Entry(run, evaluation, label, evaluation.result.model in teachers)
            for (run, evaluation), label in zip(found, labels, strict=True)
        ]
    )


def line_up(entries: Sequence[Entry]) -> Lineup:
    """Returns the entries with their parts handed out."""
    students = [entry for entry in entries if not entry.is_teacher]
    taught = [entry for entry in entries if entry.is_teacher]
    before = next(iter(students or entries), None)
    rivals = _rivals(before, students, taught) if before else []
    accuracies = [_accuracy_beside(before, rival) for rival in rivals] if before else []
    best = max(zip(accuracies, range(len(rivals)), strict=True), default=None)
    return Lineup(
        entries=entries,
        before=before,
        after=rivals[-1] if rivals else None,
        best=rivals[best[1]] if best else None,
        num_rivals=len(rivals),
        teacher=taught[-1] if taught and taught[-1] is not before else None,
    )


def shared_tasks(one: Evaluation, other: Evaluation) -> int:
    """Returns how many tasks both evaluations have an outcome of."""
    return len({task.task_id for task in one.tasks} & {task.task_id for task in other.tasks})


def _rivals(before: Entry, students: Sequence[Entry], taught: Sequence[Entry]) -> list[Entry]:
    """Returns who `before` is compared with: other students, else the teacher, else itself."""
    model = before.evaluation.result.model
    others = [entry for entry in students if entry.evaluation.result.model != model]
    for tier in (others, taught, students):
        comparable = [
            entry
            for entry in tier
            if entry is not before
            and shared_tasks(before.evaluation, entry.evaluation) >= MIN_SHARED
        ]
        if comparable:
            return comparable
    return []


def _accuracy_beside(before: Entry, rival: Entry) -> float:
    return compare(before.evaluation, rival.evaluation).candidate_accuracy


def _teachers_of_runs(
    reader: FolderReader, runs: Sequence[Run], settings: Mapping[str, Settings]
) -> set[str]:
    """Returns the models that runs learned from; a student's own rollouts make it no teacher."""
    asked = [
        reader.document(run.folder / "request.json", _Request)
        for run in runs
        if run.state.kind is RunKind.ROLLOUTS
    ]
    sampled = {request.request.model for request in asked if request}
    students = {one.student for one in settings.values()} | set(settings)
    return (sampled - students) | {one.teacher for one in settings.values() if one.teacher}


def _labels(names: Sequence[str]) -> list[str]:
    """Returns the names shortened; one that comes again is numbered."""
    seen: Counter[str] = Counter()
    labels: list[str] = []
    for name in map(short_name, names):
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return labels

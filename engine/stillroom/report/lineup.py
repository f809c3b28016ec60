"""The evaluations in order, each with its role in the report: first, best, teacher or other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stillroom.evaluate.compare import compare
from stillroom.evaluate.files import RESULT_FILE, Evaluation, EvaluationResult
from stillroom.report.curves import TrainingSettings
from stillroom.report.folders import FolderReader, Run
from stillroom.report.wording import short_name
from stillroom.run_folder import RunFolder, RunRequest
from stillroom.types import RunKind, RunStatus

Role = Literal["first", "best", "teacher", "other"]

MIN_SHARED = 2
"""The minimum number of shared tasks for comparing two evaluations."""


@dataclass(frozen=True, slots=True)
class EvaluationEntry:
    """One evaluation in the report."""

    run: Run
    evaluation: Evaluation
    label: str
    """The evaluation's name, shortened, and numbered if earlier ones on its tasks have it."""
    is_teacher: bool


@dataclass(frozen=True, slots=True)
class Lineup:
    """All evaluations, oldest first, and the ones that the headline compares."""

    entries: Sequence[EvaluationEntry]
    before: EvaluationEntry | None
    """The earliest evaluation of a model that is not a teacher; a later one of that model, if it
    adds tasks to the same ones."""
    after: EvaluationEntry | None
    """The latest evaluation on the same tasks as `before`."""
    best: EvaluationEntry | None
    """The most accurate of the `num_candidates` evaluations on the same tasks as `before`."""
    num_candidates: int
    teacher: EvaluationEntry | None

    def role(self, entry: EvaluationEntry) -> Role:
        """Returns the role of an entry."""
        if entry.is_teacher:
            return "teacher"
        if len(self.entries) > 1 and entry is self.before:
            return "first"
        return "best" if entry is self.best else "other"

    def most_important(self, limit: int) -> list[EvaluationEntry]:
        """Returns at most `limit` entries, oldest first; those with a role take precedence."""
        compared = [self.before, self.teacher, self.best, self.after]
        chosen = [entry for entry in self.entries if any(entry is other for other in compared)]
        others = [entry for entry in self.entries if all(entry is not other for other in chosen)]
        kept_ids = {e.run.run_id for e in [*chosen, *reversed(others)][:limit]}
        return [entry for entry in self.entries if entry.run.run_id in kept_ids]


def read_lineup(
    reader: FolderReader, runs: Sequence[Run], settings: Mapping[str, TrainingSettings]
) -> Lineup:
    """Returns the finished evaluations among the runs."""
    evaluations: list[tuple[Run, Evaluation]] = []
    for run in runs:
        if run.state.kind is RunKind.EVALUATE:
            is_finished = run.state.status is RunStatus.SUCCEEDED
            # A dry run measures nothing.
            is_finished = is_finished and not (run.state.result or {}).get("dry_run")
            path = run.folder / RESULT_FILE
            evaluation = reader.document(path, Evaluation, is_required=is_finished)
            if evaluation is not None:
                evaluations.append((run, evaluation))
    kl_teachers = {
        evaluation.result.teacher for _, evaluation in evaluations if evaluation.result.teacher
    }
    teachers = kl_teachers | _teachers_of_runs(reader, runs, settings)
    labels = _labels([evaluation.result for _, evaluation in evaluations])
    return line_up(
        [
            EvaluationEntry(run, evaluation, label, evaluation.result.model in teachers)
            for (run, evaluation), label in zip(evaluations, labels, strict=True)
        ]
    )


def line_up(entries: Sequence[EvaluationEntry]) -> Lineup:
    """Returns the lineup of the entries, with the roles assigned."""
    students = [entry for entry in entries if not entry.is_teacher]
    teachers = [entry for entry in entries if entry.is_teacher]
    before = next(iter(students or entries), None)
    if before is not None:
        before = next((entry for entry in students if _extends(entry, before)), before)
    candidates = _candidates(before, students, teachers) if before else []
    accuracies = (
        [
            compare(before.evaluation, candidate.evaluation).candidate_accuracy
            for candidate in candidates
        ]
        if before
        else []
    )
    best = max(zip(accuracies, range(len(candidates)), strict=True), default=None)
    return Lineup(
        entries=entries,
        before=before,
        after=candidates[-1] if candidates else None,
        best=candidates[best[1]] if best else None,
        num_candidates=len(candidates),
        teacher=teachers[-1] if teachers and teachers[-1] is not before else None,
    )


def _extends(entry: EvaluationEntry, first: EvaluationEntry) -> bool:
    """Returns whether an entry evaluates the same model on all tasks of `first`, and on more."""
    old, new = first.evaluation, entry.evaluation
    is_same_model = old.result.model == new.result.model
    return is_same_model and num_shared_tasks(old, new) == len(old.tasks) < len(new.tasks)


def num_shared_tasks(first: Evaluation, second: Evaluation) -> int:
    """Returns the number of tasks that both evaluations have."""
    return len({task.task_id for task in first.tasks} & {task.task_id for task in second.tasks})


def _candidates(
    before: EvaluationEntry,
    students: Sequence[EvaluationEntry],
    teachers: Sequence[EvaluationEntry],
) -> list[EvaluationEntry]:
    """Returns the entries that `before` is compared with: other students, or the teacher."""
    model = before.evaluation.result.model
    others = [entry for entry in students if entry.evaluation.result.model != model]
    for group in (others, teachers, students):
        shared = [
            (num_shared_tasks(before.evaluation, entry.evaluation), entry)
            for entry in group
            if entry is not before
        ]
        # Evaluations on other prompts may share a few tasks by chance, e.g. those that rewording
        # did not change.
        min_shared = max(MIN_SHARED, max((num for num, _ in shared), default=0) / 2)
        if comparable := [entry for num, entry in shared if num >= min_shared]:
            return comparable
    return []


def _teachers_of_runs(
    reader: FolderReader, runs: Sequence[Run], settings: Mapping[str, TrainingSettings]
) -> set[str]:
    """Returns the models whose rollouts or scores were used for training, except students."""
    run_requests = [
        reader.document(RunFolder(run.folder).request_file, RunRequest)
        for run in runs
        if run.state.kind is RunKind.ROLLOUTS
    ]
    sampled = {str(entry.request.get("model", "")) for entry in run_requests if entry}
    students = {entry.student for entry in settings.values()} | set(settings)
    return (sampled - students) | {entry.teacher for entry in settings.values() if entry.teacher}


def _labels(results: Sequence[EvaluationResult]) -> list[str]:
    """Returns the shortened names, with numbers added to repeated names on the same tasks."""
    seen: Counter[tuple[str, str]] = Counter()
    labels: list[str] = []
    for result in results:
        name = short_name(result.name)
        seen[name, result.data] += 1
        num = seen[name, result.data]
        labels.append(name if num == 1 else f"{name} ({num})")
    return labels

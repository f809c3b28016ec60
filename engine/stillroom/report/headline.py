"""The headline of the report: its result in one sentence and a few figures."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.evaluate.compare import Comparison, compare
from stillroom.evaluate.decision import gap_closed
from stillroom.report.lineup import MIN_SHARED, EvaluationEntry, Lineup, num_shared_tasks
from stillroom.report.wording import (
    Figure,
    Interval,
    interval_text,
    number,
    number_interval,
    percent,
    percent_interval,
    plural,
    points,
    short_name,
)


@dataclass(frozen=True, slots=True)
class Phrase:
    """A part of the headline's sentence."""

    text: str
    is_name: bool = False
    """Whether it is a model's name, which is highlighted and not wrapped."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The headline's sentence and its figures."""

    sentence: Sequence[Phrase]
    figures: Sequence[Figure]


def headline(lineup: Lineup, *, num_runs: int) -> Headline:
    """Returns the headline of the evaluations, or of the runs if there is no evaluation."""
    before, best = lineup.before, lineup.best
    if before is None:
        return Headline([Phrase(_without_evaluations(num_runs))], ())
    if best is None:
        return Headline(_single_sentence(before, lineup), _single_figures(before))
    comparison = compare(before.evaluation, best.evaluation)
    clauses = _comparison_clause(before, best, comparison, lineup) + _teacher_clause(best, lineup)
    return Headline(clauses, _figures(before, best, comparison, lineup))


def _without_evaluations(num_runs: int) -> str:
    if not num_runs:
        return "There are no runs in this workspace yet."
    return (
        f"{plural(num_runs, 'run')} so far, but no evaluation has finished, so the models' "
        "accuracy is not known yet."
    )


def _single_sentence(entry: EvaluationEntry, lineup: Lineup) -> list[Phrase]:
    """Returns the sentence about an evaluation that is compared with no other."""
    result = entry.evaluation.result
    interval = percent_interval(result.accuracy)
    interval_text = f" (95 % interval {interval.range})" if interval.range else ""
    tasks = plural(result.accuracy.n, "task")
    text = f" answers {interval.value} of {tasks} correctly{interval_text}; "
    if len(lineup.entries) > 1:
        text += "no other evaluation has the same tasks."
    else:
        text += "there is no other evaluation to compare it with yet."
    return [_name(entry), Phrase(text)]


def _comparison_clause(
    before: EvaluationEntry, best: EvaluationEntry, comparison: Comparison, lineup: Lineup
) -> list[Phrase]:
    """Returns the beginning of the sentence that compares the first evaluation with the best."""
    new, old = percent(comparison.candidate_accuracy), percent(comparison.baseline_accuracy)
    tasks = plural(comparison.tasks_shared, "task")
    difference = comparison.difference
    rank = f", the best of {lineup.num_candidates}," if lineup.num_candidates > 1 else ""
    if difference.value <= 0:
        unbeaten = Phrase(f" is not beaten: it answers {old} of {tasks} correctly; ")
        return [_name(before), unbeaten, _name(best), Phrase(f"{rank} answers {new}")]
    if comparison.is_significant:
        verdict = f": {points(difference.value, is_signed=False)} points more"
    else:
        verdict = ", which may be chance"
    return [
        _name(best),
        Phrase(f"{rank} answers {new} of {tasks} correctly, "),
        _name(before),
        Phrase(f" {old}{verdict} ({interval_text(difference)})"),
    ]


def _name(entry: EvaluationEntry) -> Phrase:
    return Phrase(entry.label, is_name=True)


def _teacher_clause(best: EvaluationEntry, lineup: Lineup) -> list[Phrase]:
    """Returns the end of the sentence: the teacher's accuracy on the same tasks, if known."""
    teacher = lineup.teacher
    if teacher is None or teacher is best:
        return [Phrase(".")]
    if num_shared_tasks(best.evaluation, teacher.evaluation) < MIN_SHARED:
        return [Phrase(".")]
    accuracy = compare(best.evaluation, teacher.evaluation).candidate_accuracy
    return [Phrase("; the teacher, "), _name(teacher), Phrase(f", answers {percent(accuracy)}.")]


def _single_figures(entry: EvaluationEntry) -> list[Figure]:
    result = entry.evaluation.result
    accuracy = _figure("Accuracy", percent_interval(result.accuracy), "")
    if result.teacher_kl is None:
        return [accuracy]
    note = f", nats per token, to {short_name(result.teacher or 'the teacher')}"
    return [accuracy, _figure("Reverse KL", number_interval(result.teacher_kl), note)]


def _figure(label: str, interval: Interval, note_end: str) -> Figure:
    note = f"95 % interval {interval.range}" if interval.range else "no interval"
    return Figure(label, interval.value, note + note_end)


def _figures(
    before: EvaluationEntry, best: EvaluationEntry, comparison: Comparison, lineup: Lineup
) -> list[Figure]:
    old, new = percent(comparison.baseline_accuracy), percent(comparison.candidate_accuracy)
    tasks = plural(comparison.tasks_shared, "task")
    difference = comparison.difference
    figures = [
        Figure("Accuracy", f"{old} → {new}", f"{before.label} → {best.label}"),
        Figure(
            "Difference",
            f"{points(difference.value, is_signed=True)} points",
            f"{interval_text(difference)}, paired over {tasks}",
        ),
    ]
    gap = _gap_closed(before, best, lineup.teacher, comparison)
    if gap is not None:
        figures.append(gap)
    kl = _kl_change(before, best)
    return figures if kl is None else [*figures, kl]


def _gap_closed(
    before: EvaluationEntry,
    best: EvaluationEntry,
    teacher: EvaluationEntry | None,
    comparison: Comparison,
) -> Figure | None:
    """Returns the closed share of the gap to the teacher, if the teacher is clearly ahead."""
    if teacher is None or best is teacher:
        return None
    if num_shared_tasks(before.evaluation, teacher.evaluation) < MIN_SHARED:
        return None
    teacher_lead = compare(before.evaluation, teacher.evaluation)
    share = gap_closed(comparison, best.evaluation, teacher.evaluation)
    if share is None or not teacher_lead.is_significant or teacher_lead.difference.value <= 0:
        return None
    answers = f"{teacher.label} answers {percent(teacher_lead.candidate_accuracy)}"
    return Figure("Gap to the teacher closed", percent(share), answers)


def _kl_change(before: EvaluationEntry, best: EvaluationEntry) -> Figure | None:
    """Returns how the KL to the teacher changed; None unless both have the same teacher."""
    old, new = before.evaluation.result, best.evaluation.result
    if old.teacher_kl is None or new.teacher_kl is None or old.teacher != new.teacher:
        return None
    value = f"{number(old.teacher_kl.value)} → {number(new.teacher_kl.value)}"
    to = short_name(new.teacher or "the teacher")
    return Figure("Reverse KL to the teacher", value, f"nats per token, to {to}; lower is closer")

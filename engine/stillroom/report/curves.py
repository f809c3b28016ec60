"""Learning curves: the metrics of each training run, step by step, and its settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.report.drawing import LineChart, Point, Series, is_drawable, line_chart
from stillroom.report.folders import TRAINING_KINDS, FolderReader, Run
from stillroom.report.wording import plural, short_name
from stillroom.run_folder import RunFolder
from stillroom.types import RunKind, RunStatus

MAX_DRAWN = 40


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """A chart for a metric of a kind of run."""

    metric: str
    title: str
    unit: str
    overlay: str | None = None
    """The name of a second metric, drawn as marks in the same chart."""
    is_collapsed: bool = False
    """Whether the chart is collapsed on the page, as a diagnostic."""


_LOSS = ChartPlan("loss", "Loss", "nats per token", overlay="val_loss")
_MAX_DATASETS = 8
_DIAGNOSTIC_PLANS = tuple(
    ChartPlan(metric, title, unit, is_collapsed=True)
    for metric, title, unit in (
        ("cold_start_loss", "Cold start", "nats per token"),
        ("loss", "Loss", "mean of the tokens"),
        ("entropy", "Student entropy", "nats per token"),
        ("repetition", "Repetition", "share of four-token sequences"),
        ("truncated", "Cut off before the end", "share of rollouts"),
        ("out_of_turns", "Out of turns", "share of rollouts"),
        ("turns", "Turns", "mean of the rollouts"),
        ("longest_response", "Longest response", "tokens"),
        ("tool_errors", "Tool errors", "per rollout"),
        ("failed", "Failed", "share of rollouts"),
        ("left_out", "Exceeded the teacher's context", "share of rollouts"),
        ("advantage", "Advantage", "mean of the tokens"),
        ("advantage_std", "Spread of the advantage", "standard deviation"),
        ("ratio", "Ratio to the sampler", "mean of the tokens"),
        ("ratio_max", "Largest ratio", "of the tokens"),
        ("clipped", "Clipped", "share of tokens"),
        ("capped", "Capped", "share of tokens"),
        ("logprob_gap", "Gap to the sampler", "nats per token"),
        ("tail", "Unlikely under the teacher", "share of tokens"),
        ("grad_norm", "Gradient", "norm before clipping"),
        ("max_turns", "Turns allowed", "curriculum"),
        ("prefix_cut", "Cut off by the curriculum", "share of rollouts"),
        ("teacher_turns", "Teacher turns", "share"),
        ("staleness", "Staleness", "iterations"),
        ("dropped", "Dropped as too old", "rollouts"),
    )
)
_TRAINING_PLANS: dict[RunKind, Sequence[ChartPlan]] = {
    RunKind.SFT: (_LOSS,),
    RunKind.DPO: (
        ChartPlan("loss", "Loss", "mean of the batch", overlay="val_loss"),
        ChartPlan("margin", "Reward margin", "chosen minus rejected"),
        ChartPlan("pair_accuracy", "Pairs ranked correctly", "share", overlay="val_pair_accuracy"),
    ),
    RunKind.DISTILL: (
        ChartPlan("teacher_kl", "Reverse KL to the teacher", "nats per token"),
        ChartPlan("reward", "Reward", "mean of the batch"),
        ChartPlan("response_tokens", "Response length", "tokens"),
        # One chart for each dataset with its own teacher.
        *(
            ChartPlan(f"teacher_kl/dataset_{i}", f"Reverse KL, dataset {i}", "nats per token")
            for i in range(_MAX_DATASETS)
        ),
        *_DIAGNOSTIC_PLANS,
    ),
}
_THROUGHPUT_PLANS = tuple(
    ChartPlan(metric, title, unit, is_collapsed=True)
    for metric, title, unit in (
        ("tokens_per_s", "Trained tokens", "per second"),
        ("grad_norm", "Gradient", "norm before clipping"),
        ("memory_gb", "Peak memory", "GB"),
    )
)
_CALL_PLANS = (
    ChartPlan("succeeded", "Rollouts", "succeeded"),
    ChartPlan("cost_usd", "Spent", "US dollars"),
    ChartPlan("calls_per_s", "Calls", "per second"),
    ChartPlan("tokens", "Tokens", "sent and received"),
    ChartPlan("failed", "Failed", "rollouts", is_collapsed=True),
)
_SERIES_NAMES = {"val_loss": "validation", "val_pair_accuracy": "validation"}
_COMMON_SECTIONS = ("data", "model", "trainer")
_STAGES = ("curriculum", "cold_start", "soft_targets")
_SECTIONS: dict[RunKind, Sequence[str]] = {
    RunKind.SFT: ("data", "model", "teacher", "soft_targets", "trainer"),
    RunKind.DPO: (*_COMMON_SECTIONS, "dpo"),
    RunKind.DISTILL: ("data", "model", "teacher", "algorithm", "rollout", *_STAGES, "trainer"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of config.yml."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings of a training run."""

    student: str | None
    teacher: str | None
    rows: Sequence[Setting]


@dataclass(frozen=True, slots=True)
class Training:
    """One training run on the page."""

    run: Run
    summary: str
    charts: Sequence[LineChart]
    diagnostics: Sequence[LineChart]
    """The charts that are collapsed on the page."""
    no_charts_reason: str | None
    """None if there are charts."""
    settings: Sequence[Setting]


class _RequestedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pass1: bool = False
    pass4: bool = False
    pass8: bool = False


class _RequestedEvaluations(msgspec.Struct, frozen=True, kw_only=True):
    evals: Sequence[_RequestedEvaluation] = ()


def chart_plans(reader: FolderReader, run: Run) -> list[ChartPlan]:
    """Returns all charts that a run may have, the most important first."""
    if run.state.kind not in TRAINING_KINDS:
        return list(_CALL_PLANS)
    plans = [
        *_TRAINING_PLANS[run.state.kind],
        *_evaluation_plans(reader, run.folder / "config.json"),
        *_THROUGHPUT_PLANS,
    ]
    return list({plan.metric: plan for plan in reversed(plans)}.values())[::-1]


def read_settings(reader: FolderReader, runs: Sequence[Run]) -> dict[str, TrainingSettings]:
    """Returns the settings of each training run that has written its config.json, by run id."""
    settings: dict[str, TrainingSettings] = {}
    for run in runs:
        if run.state.kind in TRAINING_KINDS:
            config = reader.document(run.folder / "config.json", dict[str, Any])
            if config is not None:
                settings[run.run_id] = _settings(config, run.state.kind)
    return settings


def read_trainings(
    reader: FolderReader, runs: Sequence[Run], settings: dict[str, TrainingSettings]
) -> list[Training]:
    """Returns the newest training runs with their charts, oldest first."""
    newest = [run for run in runs if run.state.kind in TRAINING_KINDS][-MAX_DRAWN:]
    return [_training(reader, run, settings.get(run.run_id)) for run in newest]


def _training(reader: FolderReader, run: Run, settings: TrainingSettings | None) -> Training:
    plans = [
        *_TRAINING_PLANS[run.state.kind],
        *_evaluation_plans(reader, run.folder / "config.json"),
    ]
    names = {name for plan in plans for name in (plan.metric, plan.overlay) if name}
    series = read_metrics(reader, RunFolder(run.folder), names)
    drawn_charts = [(plan, _chart(plan, series)) for plan in plans if series[plan.metric].points]
    charts = [chart for plan, chart in drawn_charts if not plan.is_collapsed]
    return Training(
        run=run,
        summary=_summary(series[plans[0].metric], settings),
        charts=charts,
        diagnostics=[chart for plan, chart in drawn_charts if plan.is_collapsed],
        no_charts_reason=None if charts else _no_charts_reason(run.state.status),
        settings=settings.rows if settings else (),
    )


def _chart(plan: ChartPlan, series: dict[str, Series]) -> LineChart:
    overlay = series[plan.overlay] if plan.overlay else None
    return line_chart(series[plan.metric], title=plan.title, unit=plan.unit, overlay=overlay)


def _evaluation_plans(reader: FolderReader, config: Path) -> list[ChartPlan]:
    """Returns a chart for each pass@k of the evaluations that config.yml requests."""
    requested = reader.document(config, _RequestedEvaluations)
    return [
        ChartPlan(
            f"eval/{section.name}/pass{k}", f"{section.name}: pass@{k}", "share of the prompts"
        )
        for section in (requested.evals if requested else ())
        for k, is_requested in ((1, section.pass1), (4, section.pass4), (8, section.pass8))
        if is_requested
    ]


def read_metrics(reader: FolderReader, run: RunFolder, names: set[str]) -> dict[str, Series]:
    """Returns the named metrics of an events file; unreadable lines are skipped."""
    values: dict[str, dict[int, float]] = {name: {} for name in names}
    missing = dict.fromkeys(names, 0)
    try:
        for step, step_metrics in run.read_metrics():
            for name in names & step_metrics.keys():
                value = step_metrics[name]
                if value is None or not is_drawable(value):
                    missing[name] += 1
                else:
                    values[name][step] = value
    except OSError as error:
        reader.note(run.events, str(error))
    return {
        name: Series(
            name=_SERIES_NAMES.get(name, name),
            points=[Point(step, value) for step, value in sorted(values[name].items())],
            num_missing=missing[name],
        )
        for name in names
    }


def _settings(config: dict[str, Any], kind: RunKind) -> TrainingSettings:
    """Returns the settings of a config.json, in the order of its sections."""
    rows = [Setting("dataset_type", kind)]
    for section in _SECTIONS[kind]:
        values = config.get(section)
        if isinstance(values, dict):
            section_values = cast("dict[str, Any]", values)
            rows += [
                Setting(f"{section}.{key}", _value_text(v))
                for key, v in section_values.items()
                if v is not None
            ]
    by_key = {row.key: row.value for row in rows}
    return TrainingSettings(by_key.get("model.path"), by_key.get("teacher.path"), rows)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _summary(series: Series, settings: TrainingSettings | None) -> str:
    """Returns the student, the teacher and the number of steps as one line."""
    parts: list[str] = []
    if settings and settings.student:
        parts.append(f"student {short_name(settings.student)}")
    if settings and settings.teacher:
        parts.append(f"teacher {short_name(settings.teacher)}")
    if series.points:
        parts.append(plural(series.points[-1].step, "step"))
    return " · ".join(parts)


def _no_charts_reason(status: RunStatus) -> str:
    if not status.is_final:
        return "No step has finished yet."
    return "The run ended before its first step."

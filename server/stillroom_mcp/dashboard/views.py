"""The content of the dashboard's pages, read from the files of the workspace."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom import api
from stillroom.errors import DataError, EngineError, InputError
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.jobs.supervise import read_run
from stillroom.lineage import FOLDER_MANIFEST, MANIFEST_SUFFIX, manifest_path
from stillroom.report.curves import ChartPlan, Setting, chart_plans, read_settings
from stillroom.report.examples import BeforeAfter, read_before_after
from stillroom.report.folders import TRAINING_KINDS, FolderReader, Run
from stillroom.report.lineup import EvaluationEntry, Lineup, read_lineup
from stillroom.report.run_list import RunRow, run_rows
from stillroom.report.scoreboard import Scoreboard, scoreboard
from stillroom.report.wording import Figure, plural, points
from stillroom.report.write import costs_of
from stillroom.run_folder import RemoteView, RunFolder, all_runs, find_run
from stillroom.settings import Workspace
from stillroom.types import RunKind
from stillroom_mcp.dashboard.live import Spending, figures, share_done, spending
from stillroom_mcp.dashboard.row_files import SUFFIXES

RUNS_PER_PAGE = 30
_MAX_FILES = 500
_FOLDERS_WITHOUT_OUTPUTS = frozenset({"node_modules", "__pycache__", "ranks"})
_SKIPPED_FOLDERS = _FOLDERS_WITHOUT_OUTPUTS | {"checkpoints"}


@dataclass(frozen=True, slots=True)
class RunCard:
    """A run in the list of runs."""

    row: RunRow
    name: str | None
    share: float | None
    """The share of its phase that is done; None if unknown, or if the run has ended."""
    spending: Spending | None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run on its own page."""

    run: Run
    outcome: str
    remote_view: RemoteView | None
    """The state of a run on another machine; None if it runs on this one."""
    name: str | None
    figures: Sequence[Figure]
    share: float | None
    spending: Spending | None
    charts: Sequence[ChartPlan]
    settings: Sequence[Setting]
    command: str | None
    rows: str | None
    """The path of the data file that the run writes or has written."""
    output: str | None
    """The file or folder that the run makes, whose lineage can be shown."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file in the workspace."""

    path: str
    num_bytes: int
    has_lineage: bool
    modified: float


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting whose value differs between two runs."""

    key: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two runs side by side."""

    first: RunView
    second: RunView
    charts: Sequence[ChartPlan]
    settings: Sequence[SettingDifference]
    verdict: str | None
    examples: BeforeAfter | None


def load_run(workspace: Workspace, run_id: str) -> Run:
    """Returns a run. Raises RunError if no run has this id."""
    folder = find_run(workspace, run_id)
    return Run(folder.path, read_run(folder))


def readable_runs(workspace: Workspace) -> list[Run]:
    """Returns the readable runs, oldest first."""
    runs: list[Run] = []
    for folder in all_runs(workspace):
        # The report lists the unreadable runs.
        with suppress(DataError, OSError):
            runs.append(Run(folder.path, read_run(folder)))
    return sorted(runs, key=lambda run: (run.state.created_at, run.run_id))


def run_cards(runs: Sequence[Run]) -> list[RunCard]:
    """Returns the entries of the list of runs, newest first."""
    return [_card(row) for row in run_rows(runs)]


def _card(row: RunRow) -> RunCard:
    state, request = row.run.state, RunFolder(row.run.folder).try_read_request()
    values = request.request if request else {}
    name = request.display_name if request else None
    is_active = not state.status.is_final and state.progress is not None
    share = share_done(state.progress) if is_active and state.progress else None
    return RunCard(row, name, share, spending(row.run, values))


def machines(workspace: Workspace) -> api.MachineList | None:
    """Returns the known machines without connecting to any; None if there are none.

    Errors in machines.yml are reported by the calls that name a machine.
    """
    with suppress(EngineError):
        # The dashboard is read-only, so it does not release machines.
        machine_list = api.list_machines(workspace, api.ListMachines(), release=lambda _log: None)
        return machine_list if machine_list.machines else None
    return None


def run_view(workspace: Workspace, run: Run) -> RunView:
    """Returns the content of a run's page, except the values of its curves."""
    reader, request = FolderReader(), RunFolder(run.folder).try_read_request()
    values = request.request if request else {}
    settings = read_settings(reader, [run]).get(run.run_id)
    rows, output = _outputs(workspace, run, values)
    state = run.state
    return RunView(
        run=run,
        outcome=run_rows([run])[0].outcome,
        remote_view=run.remote_view,
        name=request.display_name if request else None,
        figures=figures(run, values),
        share=share_done(state.progress) if state.progress else None,
        spending=spending(run, values),
        charts=chart_plans(reader, run),
        settings=settings.rows if settings else _plain_settings(values),
        command=api.command_of(request) if request else None,
        rows=rows,
        output=output,
    )


def _plain_settings(request: Mapping[str, Any]) -> list[Setting]:
    """Returns the options of a request that are set, for runs without a config.yml."""
    values = {key: value for key, value in request.items() if value not in (None, [], "")}
    return [Setting(key, str(value)) for key, value in values.items()]


def _outputs(
    workspace: Workspace, run: Run, request: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Returns a run's data file, if it writes one, and its output file or folder."""
    rollouts = run.folder / "rollouts.jsonl"
    if rollouts.exists():
        return workspace.shown(rollouts), workspace.shown(rollouts)
    if run.state.kind in TRAINING_KINDS:
        final = run.folder / "checkpoints" / "final"
        return None, workspace.shown(final) if final.is_dir() else None
    output = request.get("output")
    if not isinstance(output, str) or not workspace.path(output).exists():
        return None, None
    return (output if output.endswith(SUFFIXES) else None), output


def evaluations(workspace: Workspace) -> tuple[Scoreboard, Lineup]:
    """Returns the finished evaluations, with their intervals."""
    reader = FolderReader()
    runs = reader.runs(workspace.runs)
    lineup = read_lineup(reader, runs, read_settings(reader, runs))
    return scoreboard(lineup, costs_of(workspace.runs, lineup)), lineup


def compared_ids(runs: Sequence[Run], first: str, second: str) -> tuple[str, str]:
    """Returns the ids of the two runs to compare, of which one or both may not be chosen yet.

    `runs` are the newest first. If none is chosen, these are the newest run that has an earlier
    one of its kind, and that one; without such a pair, the two newest. An id is empty if there
    are not two runs.
    """
    if not first and not second and runs:
        num_of_kind = Counter(run.state.kind for run in runs)
        paired = (run.run_id for run in runs if num_of_kind[run.state.kind] > 1)
        second = next(paired, runs[0].run_id)
    first = first or _other_id(runs, second)
    return first, second or _other_id(runs, first)


def _other_id(runs: Sequence[Run], run_id: str) -> str:
    """Returns the id of the newest other run, of the same kind if there is one."""
    kind = next((run.state.kind for run in runs if run.run_id == run_id), None)
    others = [run for run in runs if run.run_id != run_id]
    same_kind = [run for run in others if run.state.kind is kind]
    return next((run.run_id for run in same_kind or others), "")


def side_by_side(workspace: Workspace, first: str, second: str) -> SideBySide:
    """Returns two runs side by side: settings, curves, and the comparison of two evaluations.

    Raises RunError if no run has one of the ids.
    """
    views = [run_view(workspace, load_run(workspace, run_id)) for run_id in (first, second)]
    plans = {plan.metric: plan for view in views for plan in view.charts}
    verdict, examples = None, None
    if all(view.run.state.kind is RunKind.EVALUATE for view in views):
        verdict = _verdict(workspace, first, second)
        examples = _examples([view.run for view in views])
    return SideBySide(
        first=views[0],
        second=views[1],
        charts=list(plans.values()),
        settings=_differences(*views),
        verdict=verdict,
        examples=examples,
    )


def _differences(first: RunView, second: RunView) -> list[SettingDifference]:
    """Returns the settings that differ between two runs; a missing value is a dash."""
    columns = [
        {setting.key: setting.value for setting in view.settings} for view in (first, second)
    ]
    keys = dict.fromkeys([*columns[0], *columns[1]])
    pairs = ((key, columns[0].get(key, "–"), columns[1].get(key, "–")) for key in keys)
    return [SettingDifference(*pair) for pair in pairs if pair[1] != pair[2]]


def _verdict(workspace: Workspace, first: str, second: str) -> str:
    """Returns the paired difference of two evaluations in a sentence."""
    request = api.CompareEvaluations(baseline=first, candidates=(second,))
    try:
        (comparison,) = api.compare_evaluations(workspace, request).comparisons
    except InputError as error:
        return f"{error.problem}."
    difference = comparison.difference
    tasks = plural(comparison.tasks_shared, "shared task")
    interval = ""
    if difference.low is not None and difference.high is not None:
        low, high = (points(end, is_signed=True) for end in (difference.low, difference.high))
        interval = f" (95 % interval {low} to {high})"
    gain = f"{points(difference.value, is_signed=True)} points on {tasks}{interval}"
    caveat = "" if comparison.is_significant else ", which may be chance"
    return f"Second minus first: {gain}{caveat}."


def _examples(runs: Sequence[Run]) -> BeforeAfter | None:
    """Returns tasks that two evaluations answered differently; None if a result is unreadable."""
    reader = FolderReader()
    entries: list[EvaluationEntry] = []
    for run in runs:
        evaluation = reader.document(run.folder / RESULT_FILE, Evaluation)
        if evaluation is None:
            return None
        entries.append(EvaluationEntry(run, evaluation, evaluation.result.name, is_teacher=False))
    first, second = entries
    return read_before_after(reader, Lineup(entries, first, second, second, 1, None))


def data_files(workspace: Workspace) -> list[DataFile]:
    """Returns the data files in the workspace except hidden ones, most recently changed first."""
    files: list[DataFile] = []
    for path in _visible_files(workspace.root):
        with suppress(OSError):
            stat = path.stat()
            has_lineage = manifest_path(path).exists()
            files.append(DataFile(workspace.shown(path), stat.st_size, has_lineage, stat.st_mtime))
    return sorted(files, key=lambda file: file.modified, reverse=True)[:_MAX_FILES]


def _visible_files(folder: Path) -> Sequence[Path]:
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f[0] != "." and f not in _SKIPPED_FOLDERS]
        files += [Path(parent, n) for n in names if n[0] != "." and n.endswith(".jsonl")]
    return [path for path in files if path.name != "events.jsonl" and not path.is_symlink()]


def newest_output(workspace: Workspace) -> str | None:
    """Returns the path of the output that was written last; None if there is none."""
    newest: tuple[int, Path] | None = None
    for parent, folders, names in os.walk(workspace.root):
        folders[:] = [f for f in folders if f[0] != "." and f not in _FOLDERS_WITHOUT_OUTPUTS]
        for name in names:
            output = _output_of_manifest(Path(parent, name))
            if output is not None:
                with suppress(OSError):
                    written = Path(parent, name).stat().st_mtime_ns
                    newest = max(newest or (written, output), (written, output))
    return workspace.shown(newest[1]) if newest else None


def _output_of_manifest(path: Path) -> Path | None:
    """Returns the output that a manifest describes; None for any other file."""
    if path.name == FOLDER_MANIFEST:
        return path.parent
    output = path.with_name(path.name.removesuffix(MANIFEST_SUFFIX))
    is_shown = path.name[0] != "." and output != path and not path.is_symlink()
    return output if is_shown and output.is_file() and not output.is_symlink() else None


def student_of(run: Run) -> str | None:
    """Returns the model that a training run trains; None for any other run."""
    settings = read_settings(FolderReader(), [run]).get(run.run_id)
    return settings.student if settings else None

"""Builds the report from the run folders and writes it."""

from collections.abc import Callable
from pathlib import Path

from stillroom.errors import EngineError
from stillroom.evaluate.costs import CostComparison, compare_costs, display_name
from stillroom.report.curves import read_settings, read_trainings
from stillroom.report.drawing import HEIGHT, WIDTH
from stillroom.report.environment import render_page, write_page
from stillroom.report.examples import read_before_after
from stillroom.report.folders import TRAINING_KINDS, FolderReader
from stillroom.report.headline import headline
from stillroom.report.left_out import StagesOf, left_out_rows
from stillroom.report.lineup import Lineup, read_lineup
from stillroom.report.outcome import RunningRecipe, latest_outcome
from stillroom.report.run_list import run_rows, totals
from stillroom.report.scoreboard import scoreboard
from stillroom.run_folder import RunRequest
from stillroom.settings import Workspace


def write_report(
    runs: Path,
    output: Path,
    *,
    title: str,
    command_of: Callable[[RunRequest], str] | None = None,
    stages_of: StagesOf = lambda _rows: (),
    recipe: RunningRecipe | None = None,
) -> Path:
    """Writes one HTML page about all runs in the folder `runs`, and returns its path.

    The page needs no other files and no network. Unreadable files are left out and listed.
    `command_of` returns the command that starts a run again, and `stages_of` the operations that
    made a training's rows. `recipe` is the one that is writing the report; the list of runs leaves
    it out, because its run has not ended.
    """
    reader = FolderReader()
    all_runs = [run for run in reader.runs(runs) if recipe is None or run.run_id != recipe.run_id]
    settings = read_settings(reader, all_runs)
    lineup = read_lineup(reader, all_runs, settings)
    html = render_page(
        "template.html.j2",
        title=title,
        headline=headline(lineup, num_runs=len(all_runs)),
        outcome=latest_outcome(all_runs, recipe),
        scoreboard=scoreboard(lineup, costs_of(runs, lineup)),
        trainings=read_trainings(reader, all_runs, settings),
        num_trainings=sum(run.state.kind in TRAINING_KINDS for run in all_runs),
        before_after=read_before_after(reader, lineup),
        left_out=left_out_rows(all_runs, stages_of),
        runs=run_rows(all_runs, command_of),
        totals=totals(all_runs),
        unreadable=reader.unreadable,
        width=WIDTH,
        height=HEIGHT,
    )
    write_page(output, html)
    return output


def costs_of(runs: Path, lineup: Lineup) -> CostComparison | None:
    """Returns the cost per task of the best student and of the teacher; None if one is unknown."""
    if lineup.best is None or lineup.teacher is None:
        return None
    student, teacher = (entry.evaluation.result for entry in (lineup.best, lineup.teacher))
    try:
        return compare_costs(Workspace(runs.parent), student, teacher, format_name=display_name)
    except EngineError:
        return None  # the report is written even if prices.yml is malformed

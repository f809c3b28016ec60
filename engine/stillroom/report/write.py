"""Builds the report from the run folders and writes it."""

from collections.abc import Callable
from pathlib import Path

from stillroom.errors import EngineError
from stillroom.evaluate.costs import CostComparison, compare_costs
from stillroom.report.curves import read_settings, trainings
from stillroom.report.drawing import HEIGHT, WIDTH
from stillroom.report.environment import render_page, write_page
from stillroom.report.examples import before_after
from stillroom.report.folders import TRAINING_KINDS, FolderReader
from stillroom.report.headline import headline
from stillroom.report.lineup import Lineup, read_lineup
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
) -> Path:
    """Writes one HTML page about all runs whose folders are under `runs`; returns its path.

    The page needs no other file and no network. What cannot be read is left out and listed.
    `command_of` makes of a run's request the command that starts the run again.
    """
    reader = FolderReader()
    found = reader.runs(runs)
    settings = read_settings(reader, found)
    lineup = read_lineup(reader, found, settings)
    html = render_page(
        "template.html.j2",
        title=title,
        headline=headline(lineup, num_runs=len(found)),
        scoreboard=scoreboard(lineup, costs_of(runs, lineup)),
        trainings=trainings(reader, found, settings),
        num_trainings=sum(run.state.kind in TRAINING_KINDS for run in found),
        before_after=before_after(reader, lineup),
        runs=run_rows(found, command_of),
        totals=totals(found),
        unreadable=reader.unreadable,
        width=WIDTH,
        height=HEIGHT,
    )
    write_page(output, html)
    return output


def costs_of(runs: Path, lineup: Lineup) -> CostComparison | None:
    """Returns what a task costs with the best student and with the teacher, if both are known."""
    if lineup.best is None or lineup.teacher is None:
        return None
    one, other = (entry.evaluation.result for entry in (lineup.best, lineup.teacher))
    try:
        return compare_costs(Workspace(runs.parent), one, other)
    except EngineError:
        return None  # a malformed prices.yml is no reason to write no report

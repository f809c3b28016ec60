"""Builds the report from the run folders and writes it."""

from dataclasses import dataclass
from pathlib import Path

from stillroom import __version__
from stillroom.lineage import now
from stillroom.report.charts.curves import Training, read_settings, trainings
from stillroom.report.charts.line import HEIGHT, WIDTH
from stillroom.report.environment import render_page, write_page
from stillroom.report.examples import BeforeAfter, before_after
from stillroom.report.folders import TRAINING_KINDS, FolderReader, Unreadable
from stillroom.report.headline import Headline, headline
from stillroom.report.lineup import read_lineup
from stillroom.report.run_list import RunRow, run_rows
from stillroom.report.scoreboard import Scoreboard, scoreboard
from stillroom.report.wording import moment

_TEMPLATE = "template.html.j2"


@dataclass(frozen=True, slots=True)
class Page:
    """Everything the template shows."""

    title: str
    written_at: str
    version: str
    headline: Headline
    scoreboard: Scoreboard
    trainings: list[Training]
    num_trainings: int
    before_after: BeforeAfter
    runs: list[RunRow]
    unreadable: list[Unreadable]


def write_report(runs: Path, output: Path, *, title: str) -> Path:
    """Writes one HTML page about all runs whose folders are under `runs`; returns its path.

    The page needs no other file and no network. What cannot be read is left out and listed.
    """
    write_page(output, render(read_page(runs, title=title)))
    return output


def read_page(path: Path, *, title: str) -> Page:
    """Returns the content of the report on the run folders under `path`."""
    reader = FolderReader()
    runs = reader.runs(path)
    settings = read_settings(reader, runs)
    lineup = read_lineup(reader, runs, settings)
    return Page(
        title=title,
        written_at=moment(now()),
        version=__version__,
        headline=headline(lineup, num_runs=len(runs)),
        scoreboard=scoreboard(lineup),
        trainings=trainings(reader, runs, settings),
        num_trainings=sum(run.state.kind in TRAINING_KINDS for run in runs),
        before_after=before_after(reader, lineup),
        runs=run_rows(runs),
        unreadable=reader.unreadable,
    )


def render(page: Page) -> str:
    """Returns the page as HTML; every text in it is escaped."""
    return render_page(_TEMPLATE, page=page, width=WIDTH, height=HEIGHT)

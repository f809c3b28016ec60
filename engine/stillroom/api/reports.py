"""The HTML report of a workspace's runs."""

from contextlib import suppress

import msgspec

from stillroom.errors import DataError
from stillroom.jobs.supervise import read_run
from stillroom.outputs import ReplacingRequest, check_page
from stillroom.run_folder import all_runs
from stillroom.settings import Workspace


class WriteReport(ReplacingRequest):
    """Ask for a page about all runs of the workspace."""

    output: str = "report.html"


class WrittenReport(msgspec.Struct, frozen=True, kw_only=True):
    """The page that was written."""

    output: str


def write_report(workspace: Workspace, request: WriteReport) -> WrittenReport:
    """Writes a self-contained HTML page about all runs and returns its path as shown to a user."""
    output, overwrite = request.output, request.overwrite
    # Imported here, so that the server loads the code that draws pages only when it needs it.
    from stillroom.report import write_report as write_page

    path = workspace.writable(output, label="output")
    check_page(path, overwrite=overwrite)
    # Reading a run whose process is gone marks it as interrupted, which the report then shows.
    for folder in all_runs(workspace):
        # The page names those that cannot be read.
        with suppress(DataError, OSError):
            read_run(folder)
    write_page(workspace.runs, path, title=workspace.root.name)
    return WrittenReport(output=workspace.shown(path))

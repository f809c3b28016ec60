"""The HTML report of a workspace's runs."""

from contextlib import suppress

from stillroom.api.operations import child_work
from stillroom.api.reproduce import command_of
from stillroom.errors import DataError
from stillroom.jobs.child import run_in_child
from stillroom.jobs.supervise import read_run
from stillroom.outputs import check_page
from stillroom.report.request import WriteReport, WrittenReport
from stillroom.run_folder import all_runs
from stillroom.settings import Workspace


def write_report(workspace: Workspace, request: WriteReport) -> WrittenReport:
    """Writes a self-contained HTML page about all runs and returns its path as shown to a user."""
    output, overwrite = request.output, request.overwrite
    # Imported here, so that the server loads the code that draws pages only when it needs it.
    from stillroom.report.request import DrawPage, Picture
    from stillroom.report.write import write_report as write_page

    path = workspace.writable(output, label="output")
    check_page(path, overwrite=overwrite)
    # Reading a run whose process is gone marks it as interrupted, which the report then shows.
    for folder in all_runs(workspace):
        # The page names those that cannot be read.
        with suppress(DataError, OSError):
            read_run(folder)
    picture = workspace.writable(path.with_suffix(".png"), label="output") if request.png else None
    write_page(workspace.runs, path, title=workspace.root.name, command_of=command_of)
    if picture is not None:
        drawing = DrawPage(page=str(path), picture=str(picture))
        run_in_child(workspace, child_work("write_report"), drawing, result=Picture)
    return WrittenReport(
        output=workspace.shown(path), picture=workspace.shown(picture) if picture else None
    )

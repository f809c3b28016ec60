"""The HTML report of a workspace's runs."""

from contextlib import suppress

from stillroom.errors import DataError
from stillroom.jobs.supervise import read_run
from stillroom.outputs import check_page
from stillroom.run_folder import all_runs
from stillroom.settings import Workspace


def write_report(workspace: Workspace, output: str, *, overwrite: bool = False) -> str:
    """Writes a self-contained HTML page about all runs and returns its path as shown to a user."""
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
    return workspace.shown(path)

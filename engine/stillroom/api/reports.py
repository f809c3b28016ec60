"""The report of a workspace's runs."""

from stillroom.report import write_report as write_html
from stillroom.settings import Workspace


def write_report(workspace: Workspace, output: str) -> str:
    """Writes a self-contained HTML page about all runs and returns its path as shown to a user."""
    path = workspace.writable(output, what="output")
    write_html(workspace.runs, path, title=workspace.root.name)
    return workspace.shown(path)

"""The HTML report of a workspace's runs."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic.fields import FieldInfo

from stillroom.api.operations import child_work, operation_of_run
from stillroom.errors import DataError
from stillroom.jobs.child import run_in_child
from stillroom.jobs.supervise import read_run
from stillroom.outputs import check_page
from stillroom.report.outcome import RunningRecipe
from stillroom.report.request import WriteReport, WrittenReport
from stillroom.run_folder import RunRequest, all_runs
from stillroom.settings import Workspace


def write_report(
    workspace: Workspace, request: WriteReport, *, recipe: RunningRecipe | None = None
) -> WrittenReport:
    """Writes a self-contained HTML page about all runs, and returns its path for display.

    recipe: the recipe that writes the report as its last stage.
    Raises InputError if the output exists and is no unchanged page of Stillroom, unless
    `overwrite` is set, and RunError if the page cannot be drawn as a picture.
    """
    output, overwrite = request.output, request.overwrite
    # Imported here so that the server loads the page code only when needed.
    from stillroom.export.provenance import data_steps
    from stillroom.report.left_out import DataStage
    from stillroom.report.request import DrawPage, Picture
    from stillroom.report.write import write_report as write_page

    path = workspace.writable(output, label="output")
    check_page(path, overwrite=overwrite)
    # Reading a run whose process has died marks it as interrupted, which the report then shows.
    for folder in all_runs(workspace):
        # The page lists the unreadable runs.
        with suppress(DataError, OSError):
            read_run(folder)
    picture = workspace.writable(path.with_suffix(".png"), label="output") if request.png else None
    write_page(
        workspace.runs,
        path,
        title=workspace.root.name,
        command_of=command_of,
        stages_of=lambda rows: (
            DataStage(step.operation, step.output, step.counts, step.left_out)
            for step in data_steps(workspace, rows)
        ),
        recipe=recipe,
    )
    if picture is not None:
        drawing = DrawPage(page=str(path), picture=str(picture))
        run_in_child(workspace, child_work("write_report"), drawing, result=Picture)
    return WrittenReport(
        output=workspace.shown(path), picture=workspace.shown(picture) if picture else None
    )


def command_of(request: RunRequest) -> str:
    """Returns the command that starts the run again, without options at their defaults."""
    operation = operation_of_run(request.kind)
    arguments = [
        argument
        for name, field in operation.request.model_fields.items()
        for argument in _flags(name, field, request.request)
    ]
    return shlex.join(["stillroom", operation.name.replace("_", "-"), *arguments])


def _flags(name: str, field: FieldInfo, request: Mapping[str, Any]) -> Iterator[str]:
    """Yields the command-line arguments for a field; none if it has its default."""
    value, default = request.get(name), field.get_default(call_default_factory=True)
    if value is None or value == default or (value == [] and not default):
        return
    if isinstance(value, list) and isinstance(default, tuple) and value == [*default]:
        return
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
        return
    yield f"--{flag}"
    yield from map(str, value) if isinstance(value, list) else [str(value)]

"""show_lineage: the tree of a lineage, the history of a row, and tagging a file."""

import msgspec

from stillroom.curate.rows.sources import check_output
from stillroom.errors import InputError
from stillroom.lineage import now
from stillroom.outputs import new_output
from stillroom.settings import Workspace
from stillroom.trace.origins import Origin, Origins
from stillroom.trace.request import Lineage, ShowLineage, State
from stillroom.trace.rows import RowTrace, rows_behind
from stillroom.trace.sources import write_sources
from stillroom.trace.states import Checker
from stillroom.trace.subject import subject_of
from stillroom.trace.walk import Walk
from stillroom.versions import tag_file


def show_lineage(workspace: Workspace, request: ShowLineage) -> Lineage:
    """Returns the lineage of a file, run or checkpoint; `tag` first keeps the file as a version."""
    origins = Origins(workspace, Checker())
    subject = subject_of(workspace, origins, request.path)
    tagged = _tagged(workspace, subject, request.tag) if request.tag is not None else None
    wanted = request.wanted_row
    row = RowTrace(workspace, origins).follow(subject, wanted) if wanted is not None else []
    walk = Walk(workspace, origins)
    root = walk.draw(subject)
    lineage = Lineage(root=root, row=row, tagged=tagged, problems=walk.problems)
    if request.sources is None:
        return lineage
    output = workspace.output_file(request.sources, label="sources")
    check_output(output, [f.path for f in rows_behind(origins, subject) if f.path.exists()])
    with new_output(output, operation="show_lineage", overwrite=False) as new:
        num_files = write_sources(workspace, origins, subject, new.rows)
        counts = {"rows": new.rows.num_rows, "files": num_files}
        new.record(inputs=[], request=request, counts=counts)
    shown, num_sources = workspace.shown(output), new.rows.num_rows
    return msgspec.structs.replace(lineage, sources=shown, num_sources=num_sources)


def _tagged(workspace: Workspace, subject: Origin, tag: str) -> str:
    if not subject.path.is_file():
        raise InputError(
            f"{workspace.shown(subject.path)} is a folder; only files are tagged",
            "checkpoints are never written to again: the run id names them for good",
        )
    is_its_own = subject.manifest is not None and subject.state is State.SAME
    manifest = msgspec.to_builtins(subject.manifest) if is_its_own else None
    version = tag_file(workspace.root, subject.path, tag, created_at=now(), manifest=manifest)
    return version.name

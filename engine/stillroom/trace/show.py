"""show_lineage: the tree of a lineage, the history of a row, and tagging a file."""

from collections import Counter
from typing import Any

import msgspec

from stillroom.errors import InputError
from stillroom.lineage import Manifest, now
from stillroom.outputs import new_output
from stillroom.rollout.sources import check_output
from stillroom.settings import Workspace
from stillroom.trace.lineage_target import subject_of
from stillroom.trace.origins import Checker, Origin, Origins
from stillroom.trace.request import Lineage, LineageNode, ShowLineage, State
from stillroom.trace.rows import RowTrace, rows_behind
from stillroom.trace.sources import write_sources
from stillroom.versions import tag_file, versions_with

MAX_NODES = 60
MAX_INPUTS = 8
_DIGITS = 12
_CURATION = ("convert_rollouts", "filter_dataset", "import_rollouts", "make_dpo_pairs")
_FILES = ("input", "output", "chosen_from", "rejected_from")
_TROUBLE = (State.CHANGED, State.MISSING)


class Walk:
    """Builds the tree, in which the inputs of each content appear once, with limited size.

    The limits are MAX_INPUTS inputs per node, and about MAX_NODES nodes in all.
    """

    def __init__(self, workspace: Workspace, origins: Origins) -> None:
        self._workspace, self._origins = workspace, origins
        self._drawn: set[tuple[str, str]] = set()
        self._room = MAX_NODES
        self.problems: list[str] = []

    def draw(self, origin: Origin) -> LineageNode:
        """Returns the node of an origin, with the nodes of what it was made from below it."""
        self._room -= 1
        shown = self._shown(origin)
        self._take_note(origin, shown)
        key = (str(origin.path), origin.record.sha256)
        is_again = key in self._drawn
        self._drawn.add(key)
        manifest = origin.manifest
        note = "shown above" if is_again and manifest is not None else origin.note
        inputs, more = ([], {}) if is_again else self._inputs(origin)
        versions = versions_with(self._workspace.root, origin.record.sha256)
        return LineageNode(
            path=shown,
            state=origin.state,
            sha256=origin.record.sha256[:_DIGITS] or None,
            role=origin.role,
            made_by=manifest.operation if manifest else None,
            run_id=manifest.run_id if manifest else None,
            created_at=manifest.created_at if manifest else None,
            counts=manifest.counts if manifest and not is_again else {},
            options=_options(manifest) if manifest and not is_again else {},
            versions=[version.name for version in versions],
            note=note,
            inputs=inputs,
            more_inputs=more,
        )

    def _inputs(self, origin: Origin) -> tuple[list[LineageNode], dict[str, int]]:
        found = origin.inputs(self._origins)
        # Changed and missing inputs come first, so that they are the last to be left out.
        ranked = sorted(range(len(found)), key=lambda i: found[i].state not in _TROUBLE)
        num_shown = max(1, min(MAX_INPUTS, self._room))
        chosen = set(ranked[:num_shown])
        nodes = [self.draw(found[i]) for i in sorted(chosen)]
        rest = [found[i] for i in range(len(found)) if i not in chosen]
        for other in rest:
            self._take_note(other, self._shown(other))
        return nodes, dict(Counter(str(other.state) for other in rest))

    def _shown(self, origin: Origin) -> str:
        if origin.shown is not None:
            return origin.shown
        return self._workspace.shown(origin.path)

    def _take_note(self, origin: Origin, shown: str) -> None:
        what = {
            State.CHANGED: "has changed since it was used",
            State.MISSING: "is missing",
        }.get(origin.state)
        if what is not None:
            problem = f"{shown} ({origin.record.sha256[:_DIGITS]}) {what}"
            kept = versions_with(self._workspace.root, origin.record.sha256)
            if kept:
                problem += f"; that content is kept as {kept[0].name}"
            if problem not in self.problems:
                self.problems.append(problem)


def _options(manifest: Manifest) -> dict[str, Any]:
    """Returns the options of a curation step that are set, except for its files.

    For other operations it is empty: the request is in the folder of the run.
    """
    if manifest.operation not in _CURATION:
        return {}
    return {
        name: value
        for name, value in manifest.request.items()
        # Not by equality, since 0 is equal to False and is an option that was given.
        if name not in _FILES and value is not None and value is not False and value not in ([], "")
    }


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

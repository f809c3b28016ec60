"""show_lineage: the tree of a lineage, the history of a row, and the tag of a file."""

from collections import Counter
from typing import Any

import msgspec

from stillroom.errors import InputError
from stillroom.lineage import Manifest, now
from stillroom.outputs import new_output
from stillroom.rollout.sources import check_output
from stillroom.settings import Workspace
from stillroom.trace.lineage_target import find_target
from stillroom.trace.origins import MAX_BYTES, Checker, Origin, Origins
from stillroom.trace.request import Lineage, LineageNode, ShowLineage, State
from stillroom.trace.rows import RowTrace, source_files
from stillroom.trace.sources import write_sources
from stillroom.versions import tag_file, versions_with

MAX_NODES = 60
MAX_INPUTS = 8
_DIGITS = 12
_CURATION = ("convert_rollouts", "filter_dataset", "import_rollouts", "make_dpo_pairs")
_FILE_OPTIONS = ("input", "output", "chosen_from", "rejected_from")
_PROBLEM_STATES = (State.CHANGED, State.MISSING)


class TreeBuilder:
    """Builds the tree of a lineage, in which the inputs of each content are shown once.

    The tree has up to MAX_INPUTS inputs per node, and about MAX_NODES nodes.
    """

    def __init__(self, workspace: Workspace, origins: Origins) -> None:
        self._workspace, self._origins = workspace, origins
        self._seen: set[tuple[str, str]] = set()
        self._nodes_left = MAX_NODES
        self.problems: list[str] = []

    def node(self, origin: Origin) -> LineageNode:
        """Returns the node of an origin, with the nodes of its inputs."""
        self._nodes_left -= 1
        shown = self._shown(origin)
        self._record_problem(origin, shown)
        key = (str(origin.path), origin.record.sha256)
        is_repeated = key in self._seen
        self._seen.add(key)
        manifest = origin.manifest
        note = "shown above" if is_repeated and manifest is not None else origin.note
        inputs, more_inputs = ([], {}) if is_repeated else self._inputs(origin)
        versions = versions_with(self._workspace.root, origin.record.sha256)
        return LineageNode(
            path=shown,
            state=origin.state,
            sha256=origin.record.sha256[:_DIGITS] or None,
            role=origin.role,
            made_by=manifest.operation if manifest else None,
            run_id=manifest.run_id if manifest else None,
            created_at=manifest.created_at if manifest else None,
            counts=manifest.counts if manifest and not is_repeated else {},
            options=_options(manifest) if manifest and not is_repeated else {},
            versions=[version.name for version in versions],
            note=note,
            inputs=inputs,
            more_inputs=more_inputs,
        )

    def _inputs(self, origin: Origin) -> tuple[list[LineageNode], dict[str, int]]:
        """Returns the nodes of the inputs, and the number of inputs left out by state."""
        inputs = origin.inputs(self._origins)
        # Changed and missing inputs come first, so that they are the last to be left out.
        ranked = sorted(range(len(inputs)), key=lambda i: inputs[i].state not in _PROBLEM_STATES)
        num_shown = max(1, min(MAX_INPUTS, self._nodes_left))
        selected = set(ranked[:num_shown])
        nodes = [self.node(inputs[i]) for i in sorted(selected)]
        hidden = [inputs[i] for i in range(len(inputs)) if i not in selected]
        for other in hidden:
            self._record_problem(other, self._shown(other))
        return nodes, dict(Counter(str(other.state) for other in hidden))

    def _shown(self, origin: Origin) -> str:
        if origin.shown is not None:
            return origin.shown
        return self._workspace.shown(origin.path)

    def _record_problem(self, origin: Origin, shown: str) -> None:
        """Adds a problem if the content has changed or is missing."""
        message = {
            State.CHANGED: "has changed since it was used",
            State.MISSING: "is missing",
        }.get(origin.state)
        if message is not None:
            problem = f"{shown} ({origin.record.sha256[:_DIGITS]}) {message}"
            versions = versions_with(self._workspace.root, origin.record.sha256)
            if versions:
                problem += f"; the content that was used is tagged as {versions[0].name}"
            if problem not in self.problems:
                self.problems.append(problem)


def _options(manifest: Manifest) -> dict[str, Any]:
    """Returns the options of a curation step that are set, without its files.

    Other operations have none here, because their run folder has the request.
    """
    if manifest.operation not in _CURATION:
        return {}
    return {
        name: value
        for name, value in manifest.request.items()
        # `is not`, because 0 equals False but is a set option.
        if name not in _FILE_OPTIONS
        and value is not None
        and value is not False
        and value not in ([], "")
    }


def show_lineage(
    workspace: Workspace, request: ShowLineage, *, max_bytes: int = MAX_BYTES
) -> Lineage:
    """Returns the lineage of a file, run or checkpoint; with `tag`, tags the file first.

    With a row query, includes that row's history; with `sources`, also writes the source rows to
    that file. At most `max_bytes` of its files are hashed; the others are `unchecked`.
    Raises InputError if the file, run or row does not exist, if a tag is already used for other
    content, or if the file for the sources exists.
    """
    origins = Origins(workspace, Checker(max_bytes=max_bytes))
    target = find_target(workspace, origins, request.path)
    tagged = _tag_target(workspace, target, request.tag) if request.tag is not None else None
    row_query = request.row_query
    row = RowTrace(workspace, origins).trace(target, row_query) if row_query is not None else []
    builder = TreeBuilder(workspace, origins)
    root = builder.node(target)
    lineage = Lineage(root=root, row=row, tagged=tagged, problems=builder.problems)
    if request.sources is None:
        return lineage
    output = workspace.output_file(request.sources, label="sources")
    check_output(output, [f.path for f in source_files(origins, target) if f.path.exists()])
    with new_output(output, operation="show_lineage", overwrite=False) as new:
        num_files = write_sources(workspace, origins, target, new.rows)
        counts = {"rows": new.rows.num_rows, "files": num_files}
        new.record(inputs=[], request=request, counts=counts)
    shown, num_sources = workspace.shown(output), new.rows.num_rows
    return msgspec.structs.replace(lineage, sources=shown, num_sources=num_sources)


def _tag_target(workspace: Workspace, target: Origin, tag: str) -> str:
    """Tags a file, and returns the name of the version. Raises InputError for a folder."""
    if not target.path.is_file():
        raise InputError(
            f"{workspace.shown(target.path)} is a folder; only files can be tagged",
            "checkpoints need no tag, because they never change: refer to them by run id",
        )
    is_described = target.manifest is not None and target.state is State.SAME
    manifest = msgspec.to_builtins(target.manifest) if is_described else None
    version = tag_file(workspace.root, target.path, tag, created_at=now(), manifest=manifest)
    return version.name

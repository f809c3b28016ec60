"""Carries out operations: at once, or as a run if the files that they read are large.

No call should keep its caller waiting, and reading a large file takes minutes. As a run the work
goes on in a process of its own, and get_run returns the same result.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from pydantic import BaseModel

from stillroom.api.start_runs import planned_bytes, start_large_run
from stillroom.data.inspect import InspectExamples
from stillroom.data.row_files import rollout_files
from stillroom.errors import EngineError
from stillroom.importing.inputs import input_files
from stillroom.importing.packed import is_packed
from stillroom.importing.request import ImportRollouts
from stillroom.jobs.operations import Operation
from stillroom.lineage import read_manifest
from stillroom.rollout.sources import source_files
from stillroom.settings import Workspace
from stillroom.trace.request import ShowLineage
from stillroom.train.config.request import PlanTraining

LARGE_BYTES = 4 << 20
"""Files of more bytes than this, all together, are worked on in a run."""
_HASHED_FASTER = 64
"""How much faster a file is hashed, or its rows counted, than the rows are judged."""
_PACKED = 10
"""How many times its size a packed log is mostly."""
_MAX_MANIFESTS = 50
_SOURCES = ("path", "input", "own", "chosen_from", "rejected_from", "decontaminate", "verdicts")
"""The fields of requests that name files with rows."""


def carry_out(workspace: Workspace, operation: Operation, request: BaseModel) -> msgspec.Struct:
    """Carries out an operation and returns its result, or the report of a run that will have it."""
    if operation.large is not None and _num_bytes(workspace, request) > LARGE_BYTES:
        inputs = [] if isinstance(request, ShowLineage) else list(_files(workspace, request))
        return start_large_run(workspace, operation.large, request, inputs=inputs)
    return operation.call(workspace, request)


def _num_bytes(workspace: Workspace, request: BaseModel) -> int:
    """Returns the size of the files that a request reads, in bytes; 0 if one cannot be found.

    What is wrong with the request is then reported by the operation itself.
    """
    try:
        if isinstance(request, PlanTraining):
            return planned_bytes(workspace, request)
        if isinstance(request, ShowLineage):
            num_bytes = sum(_lineage_sizes(workspace, request))
            return num_bytes if request.row is not None else num_bytes // _HASHED_FASTER
        num_bytes = sum(map(_content_size, _files(workspace, request)))
        # Without a student's template only a few rows are read; the others are counted.
        is_counted = isinstance(request, InspectExamples) and request.model is None
        return num_bytes // _HASHED_FASTER if is_counted else num_bytes
    except (EngineError, OSError):
        return 0


def _content_size(file: Path) -> int:
    return file.stat().st_size * (_PACKED if is_packed(file) else 1)


def _files(workspace: Workspace, request: BaseModel) -> Iterator[Path]:
    if isinstance(request, ImportRollouts):
        yield from input_files(workspace, request.inputs)
        return
    for field in _SOURCES:
        given = getattr(request, field, None) or ()
        names: Iterable[str] = [given] if isinstance(given, str) else given
        for name in names:
            path = workspace.path(name)
            if path.exists():
                yield from rollout_files(path)
            else:
                yield from (source.path for source in source_files(workspace, name))


def _lineage_sizes(workspace: Workspace, request: ShowLineage) -> Iterator[int]:
    """Yields the sizes of the files of a lineage, as their manifests record them."""
    path = workspace.existing(request.path, label="path")
    waiting, seen = [path], {path}
    while waiting and len(seen) <= _MAX_MANIFESTS:
        path = waiting.pop()
        yield path.stat().st_size if path.is_file() else 0
        manifest = read_manifest(path)
        for record in manifest.inputs if manifest is not None else ():
            found = Path(record.path)
            if found not in seen and found.exists():
                seen.add(found)
                waiting.append(found)

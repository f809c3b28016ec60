"""convert_rollouts on a Ray cluster, with the same rows and counts as in one process."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from stillroom.curate.convert import (
    MAX_EXAMPLES,
    Conversion,
    ConvertResult,
    ConvertRollouts,
    SourceCount,
    own_sources,
    writing,
)
from stillroom.curate.ray.parts import RayParts, ray_parts
from stillroom.curate.rows.sources import check_output
from stillroom.files import LineWriter, atomic_output
from stillroom.lineage import FileRecord, record_file
from stillroom.rollout.sources import SourceFile, source_files
from stillroom.settings import Workspace


@dataclass(frozen=True, slots=True)
class _Job:
    source: SourceFile
    part: Path
    request: ConvertRollouts


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    num_rows: int
    count: SourceCount
    problems: list[str]
    derived: int
    teachers: Counter[str]
    source: FileRecord


def convert_on_ray(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Does what `convert_rollouts` does, with one Ray task per file."""
    sources = source_files(workspace, request.input)
    own = own_sources(workspace, request, sources)
    output = workspace.output_file(request.output, label="output")
    check_output(output, [source.path for source in (*sources, *own)])
    with writing(output, request) as new, ray_parts(request.ray_address, output) as parts:
        conversion = Conversion(new.rows, request)
        records = _converted(parts, sources, conversion, request, new.rows)
        conversion.add_own(own, request)
        records += [record_file(source.path) for source in own]
        return conversion.finish(workspace, request, new, sources, records)


def _converted(
    parts: RayParts,
    sources: list[SourceFile],
    conversion: Conversion,
    request: ConvertRollouts,
    rows: LineWriter,
) -> list[FileRecord]:
    """Converts the files on the cluster and joins the parts; returns records of the inputs."""
    jobs = [_Job(source, parts.path(number), request) for number, source in enumerate(sources)]
    records: list[FileRecord] = []
    for part in parts.each(_convert, jobs):
        rows.append_file(part.path, num_rows=part.num_rows)
        part.path.unlink()
        conversion.sources.append(part.count)
        conversion.problems += part.problems[: MAX_EXAMPLES - len(conversion.problems)]
        conversion.derived += part.derived
        conversion.teachers.update(part.teachers)
        records.append(part.source)
    return records


def _convert(job: _Job) -> _Part:
    with atomic_output(job.part) as rows:
        conversion = Conversion(rows, job.request)
        conversion.convert(job.source)
    return _Part(
        job.part,
        rows.num_rows,
        conversion.sources[0],
        conversion.problems,
        conversion.derived,
        conversion.teachers,
        record_file(job.source.path),
    )

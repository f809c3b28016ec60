"""convert_rollouts and make_dpo_pairs on a Ray cluster, with the same rows and counts as here."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillroom.curate.convert import (
    MAX_EXAMPLES,
    Conversion,
    ConvertResult,
    ConvertRollouts,
    SourceCount,
    open_conversion,
)
from stillroom.curate.pair_candidates import IndexedRollout, PairReader, TaskIndex, index_rollouts
from stillroom.curate.pairs import (
    MakeDpoPairs,
    Pairing,
    PairsResult,
    PairTally,
    PairWriter,
    open_pairing,
)
from stillroom.curate.ray.parts import RayParts, ray_parts
from stillroom.files import LineWriter, atomic_output
from stillroom.lineage import FileRecord, record_file
from stillroom.rollout.sources import SourceFile
from stillroom.settings import Workspace


@dataclass(frozen=True, slots=True)
class _ConvertJob:
    source: SourceFile
    part: Path
    request: ConvertRollouts


@dataclass(frozen=True, slots=True)
class _ConvertedPart:
    path: Path
    num_rows: int
    count: SourceCount
    problems: list[str]
    derived: int
    teachers: Counter[str]
    source: FileRecord


def convert_on_ray(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Does what `convert_rollouts` does, with one Ray task per file."""
    with open_conversion(workspace, request) as opened:
        rows, conversion = opened.output.rows, Conversion(opened.output.rows, request)
        with ray_parts(request.ray_address, opened.output.path) as parts:
            records = _converted(parts, opened.sources, conversion, request, rows)
        conversion.add_own(opened.own, request)
        records += [record_file(source.path) for source in opened.own]
        return conversion.finish(workspace, request, opened, records)


def _converted(
    parts: RayParts,
    sources: list[SourceFile],
    conversion: Conversion,
    request: ConvertRollouts,
    rows: LineWriter,
) -> list[FileRecord]:
    """Converts the files on the cluster and joins the parts; returns records of the inputs."""
    jobs = [
        _ConvertJob(source, parts.path(number), request) for number, source in enumerate(sources)
    ]
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


def _convert(job: _ConvertJob) -> _ConvertedPart:
    with atomic_output(job.part) as rows:
        conversion = Conversion(rows, job.request)
        conversion.convert(job.source)
    return _ConvertedPart(
        job.part,
        rows.num_rows,
        conversion.sources[0],
        conversion.problems,
        conversion.derived,
        conversion.teachers,
        record_file(job.source.path),
    )


_ROLLOUTS_PER_JOB = 2000


@dataclass(frozen=True, slots=True)
class _Indexed:
    index: TaskIndex
    skipped: Counter[str]
    source: FileRecord


@dataclass(frozen=True, slots=True)
class _Task:
    task_id: str
    better: list[IndexedRollout]
    worse: list[IndexedRollout] | None
    """The rollouts of the rejected side; None if those in `better` are compared with each other."""


@dataclass(frozen=True, slots=True)
class _PairJob:
    request: MakeDpoPairs
    tasks: list[_Task]
    part: Path


@dataclass(frozen=True, slots=True)
class _PairedPart:
    path: Path
    num_rows: int
    tally: PairTally


def pair_on_ray(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Does what `make_dpo_pairs` does, on a Ray cluster.

    One Ray task indexes each file, and one pairs each batch of about 2000 rollouts.
    """
    with (
        open_pairing(workspace, request) as pairing,
        ray_parts(request.ray_address, pairing.output.path) as parts,
    ):
        records: dict[Path, FileRecord] = {}
        skipped = pairing.tally.skipped
        pairing.compare([_indexed(parts, side, skipped, records) for side in pairing.sides])
        for part in parts.each(_pair, _jobs(parts, request, pairing)):
            pairing.output.rows.append_file(part.path, num_rows=part.num_rows)
            part.path.unlink()
            pairing.tally.take(part.tally)
        return pairing.finish([records[file] for file in pairing.files])


def _indexed(
    parts: RayParts, side: list[Path], skipped: Counter[str], records: dict[Path, FileRecord]
) -> TaskIndex:
    index: TaskIndex = {}
    for path, part in zip(side, parts.each(_index, side), strict=True):
        for task_id, entries in part.index.items():
            index.setdefault(task_id, []).extend(entries)
        skipped.update(part.skipped)
        records[path] = part.source
    return index


def _index(path: Path) -> _Indexed:
    skipped: Counter[str] = Counter()
    return _Indexed(index_rollouts([path], skipped), skipped, record_file(path))


def _jobs(parts: RayParts, request: MakeDpoPairs, pairing: Pairing) -> Iterator[_PairJob]:
    worse = None if pairing.worse is pairing.better else pairing.worse
    tasks: list[_Task] = []
    size = number = 0
    for task_id, entries in pairing.better.items():
        others = None if worse is None else worse.get(task_id, [])
        tasks.append(_Task(task_id, entries, others))
        size += len(entries) + len(others or ())
        if size >= _ROLLOUTS_PER_JOB:
            yield _PairJob(request, tasks, parts.path(number))
            tasks, size, number = [], 0, number + 1
    if tasks:
        yield _PairJob(request, tasks, parts.path(number))


def _pair(job: _PairJob) -> _PairedPart:
    tally = PairTally()
    with atomic_output(job.part) as rows, PairReader() as reader:
        writer = PairWriter(job.request, tally, reader, rows)
        for task in job.tasks:
            worse = task.better if task.worse is None else task.worse
            writer.write_task(task.task_id, task.better, worse)
    return _PairedPart(job.part, rows.num_rows, tally)

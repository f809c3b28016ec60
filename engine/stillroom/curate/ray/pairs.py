"""make_dpo_pairs on a Ray cluster: indexes files and pairs tasks in parallel, in a fixed order."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillroom.curate.pair_candidates import IndexedRollout, PairReader, TaskIndex, index_rollouts
from stillroom.curate.pairs import MakeDpoPairs, Pairing, PairsResult, PairTally, PairWriter
from stillroom.curate.ray.parts import RayParts, ray_parts
from stillroom.files import atomic_output
from stillroom.lineage import FileRecord, record_file
from stillroom.settings import Workspace

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
class _Job:
    request: MakeDpoPairs
    tasks: list[_Task]
    part: Path


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    num_rows: int
    tally: PairTally


def pair_on_ray(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Does what `make_dpo_pairs` does, on a Ray cluster.

    One Ray task indexes each file, and one pairs each batch of about 2000 rollouts.
    """
    pairing = Pairing(workspace, request)
    with pairing.writing() as output, ray_parts(request.ray_address, output.path) as parts:
        records: dict[Path, FileRecord] = {}
        skipped = pairing.tally.skipped
        pairing.compare([_indexed(parts, side, skipped, records) for side in pairing.sides])
        for part in parts.each(_pair, _jobs(parts, request, pairing)):
            output.rows.append_file(part.path, num_rows=part.num_rows)
            part.path.unlink()
            pairing.tally.take(part.tally)
        return pairing.finish(output, [records[file] for file in pairing.files])


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


def _jobs(parts: RayParts, request: MakeDpoPairs, pairing: Pairing) -> Iterator[_Job]:
    worse = None if pairing.worse is pairing.better else pairing.worse
    tasks: list[_Task] = []
    size = number = 0
    for task_id, entries in pairing.better.items():
        others = None if worse is None else worse.get(task_id, [])
        tasks.append(_Task(task_id, entries, others))
        size += len(entries) + len(others or ())
        if size >= _ROLLOUTS_PER_JOB:
            yield _Job(request, tasks, parts.path(number))
            tasks, size, number = [], 0, number + 1
    if tasks:
        yield _Job(request, tasks, parts.path(number))


def _pair(job: _Job) -> _Part:
    tally = PairTally()
    with atomic_output(job.part) as rows, PairReader() as reader:
        writer = PairWriter(job.request, tally, reader, rows)
        for task in job.tasks:
            worse = task.better if task.worse is None else task.worse
            writer.write_task(task.task_id, task.better, worse)
    return _Part(job.part, rows.num_rows, tally)

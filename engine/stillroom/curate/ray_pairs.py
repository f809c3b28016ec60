"""make_dpo_pairs over a Ray cluster: files are indexed apart, tasks paired apart, in one order."""

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillroom.curate.pairing import Entry, Index, PairReader, index_rollouts
from stillroom.curate.pairs import MakeDpoPairs, PairsResult, PairWriter, no_pairs
from stillroom.curate.ray_parts import RayParts, ray_parts
from stillroom.curate.rows import check_output
from stillroom.curate.sources import source_files
from stillroom.files import LineWriter, atomic_output
from stillroom.lineage import FileRecord, record_file, write_manifest
from stillroom.settings import Workspace

_ROLLOUTS_PER_JOB = 2000


@dataclass(frozen=True, slots=True)
class _Indexed:
    index: Index
    skipped: Counter[str]
    source: FileRecord


@dataclass(frozen=True, slots=True)
class _Task:
    task_id: str
    better: list[Entry]
    worse: list[Entry] | None
    """None: they are compared with each other."""


@dataclass(frozen=True, slots=True)
class _Job:
    request: MakeDpoPairs
    tasks: list[_Task]
    part: Path


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    num_rows: int
    skipped: Counter[str]
    differences: "array[float]"
    tasks_with_pairs: int


def pair_on_ray(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Does what `make_dpo_pairs` does: a file a task to index, some tasks' rollouts to pair."""
    output = workspace.output_file(request.output, what="output")
    names = [n for n in (request.input, request.chosen_from, request.rejected_from) if n]
    sides = [[file.path for file in source_files(workspace, name)] for name in names]
    files = list(dict.fromkeys(file for side in sides for file in side))
    check_output(output, files)
    skipped: Counter[str] = Counter()
    with ray_parts(request.ray_address, output) as parts:
        records: dict[Path, FileRecord] = {}
        indexes = [_indexed(parts, side, skipped, records) for side in sides]
        read = sum(len(e) for index in indexes for e in index.values()) + skipped.total()
        better, worse = indexes[0], indexes[-1]
        if num_alone := len(worse.keys() - better.keys()):
            skipped["task on the rejected side only"] = num_alone
        with atomic_output(output) as rows:
            jobs = _jobs(parts, request, better, None if worse is better else worse)
            differences, with_pairs = _paired(parts, jobs, rows, skipped)
            if rows.num_rows == 0:
                raise no_pairs(better, worse, skipped)
    result = PairsResult(
        output=workspace.shown(output),
        read=read,
        tasks=len(better),
        tasks_with_pairs=with_pairs,
        pairs=rows.num_rows,
        skipped=dict(skipped),
        mean_difference=math.fsum(differences) / rows.num_rows,
    )
    write_manifest(
        output,
        written=rows,
        operation="make_dpo_pairs",
        inputs=[records[file] for file in files],
        request=request.model_dump(mode="json"),
        counts={"read": result.read, "pairs": result.pairs},
    )
    return result


def _indexed(
    parts: RayParts, side: list[Path], skipped: Counter[str], records: dict[Path, FileRecord]
) -> Index:
    index: Index = {}
    for path, part in zip(side, parts.each(_index, side), strict=True):
        for task_id, entries in part.index.items():
            index.setdefault(task_id, []).extend(entries)
        skipped.update(part.skipped)
        records[path] = part.source
    return index


def _index(path: Path) -> _Indexed:
    skipped: Counter[str] = Counter()
    return _Indexed(index_rollouts([path], skipped), skipped, record_file(path))


def _jobs(
    parts: RayParts, request: MakeDpoPairs, better: Index, worse: Index | None
) -> Iterator[_Job]:
    tasks: list[_Task] = []
    size = number = 0
    for task_id, entries in better.items():
        others = None if worse is None else worse.get(task_id, [])
        tasks.append(_Task(task_id, entries, others))
        size += len(entries) + len(others or ())
        if size >= _ROLLOUTS_PER_JOB:
            yield _Job(request, tasks, parts.path(number))
            tasks, size, number = [], 0, number + 1
    if tasks:
        yield _Job(request, tasks, parts.path(number))


def _paired(
    parts: RayParts, jobs: Iterator[_Job], rows: LineWriter, skipped: Counter[str]
) -> tuple["array[float]", int]:
    differences, with_pairs = array("d"), 0
    for part in parts.each(_pair, jobs):
        rows.append_file(part.path, num_rows=part.num_rows)
        part.path.unlink()
        skipped.update(part.skipped)
        differences.extend(part.differences)
        with_pairs += part.tasks_with_pairs
    return differences, with_pairs


def _pair(job: _Job) -> _Part:
    skipped: Counter[str] = Counter()
    with atomic_output(job.part) as rows, PairReader() as reader:
        writer = PairWriter(job.request, skipped, reader, rows)
        for task in job.tasks:
            worse = task.better if task.worse is None else task.worse
            writer.write_task(task.task_id, task.better, worse)
    return _Part(job.part, rows.num_rows, skipped, writer.differences, writer.tasks_with_pairs)

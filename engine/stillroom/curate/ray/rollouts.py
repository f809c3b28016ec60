"""convert_rollouts and make_dpo_pairs on a Ray cluster, with the same result as in one process."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stillroom.curate.convert import (
    Conversion,
    ConversionTally,
    ConvertResult,
    ConvertRollouts,
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
from stillroom.curate.project_tools import ProjectTools
from stillroom.curate.ray.parts import RaySession, WrittenPart, ray_session
from stillroom.files import atomic_output
from stillroom.lineage import FileRecord, record_file
from stillroom.rollout.sources import SourceFile
from stillroom.settings import Workspace

_ROLLOUTS_PER_JOB = 2000


def convert_on_ray(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Converts rollouts as `convert_rollouts` does, with one Ray task per file."""
    with open_conversion(workspace, request) as opened:
        opened.tools.load()  # in the driver: the file may be missing on the tasks' machines
        conversion = Conversion(opened.output.rows, request, tools=opened.tools)
        records = list[FileRecord]()
        with ray_session(request.ray_address, opened.output.path) as session:
            jobs = (
                (source, session.path(number), request, opened.tools)
                for number, source in enumerate(opened.sources)
            )
            for part, record in session.map(_convert_file, jobs):
                part.append_to(opened.output.rows)
                conversion.tally.merge(part.tally)
                records.append(record)
        conversion.add_own(opened.own, request)
        records += [record_file(source.path) for source in opened.own]
        return conversion.finish(workspace, request, opened, records)


def _convert_file(
    source: SourceFile, path: Path, request: ConvertRollouts, tools: ProjectTools
) -> tuple[WrittenPart[ConversionTally], FileRecord]:
    with atomic_output(path) as rows:
        conversion = Conversion(rows, request, tools=tools)
        conversion.convert(source)
    return WrittenPart(path, rows.num_rows, conversion.tally), record_file(source.path)


def pair_on_ray(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Pairs rollouts as `make_dpo_pairs` does, on a Ray cluster.

    One Ray task indexes each file, and one pairs each batch of about 2000 rollouts.
    """
    with (
        open_pairing(workspace, request) as pairing,
        ray_session(request.ray_address, pairing.output.path) as session,
    ):
        pairing.tools.load()
        records: dict[Path, FileRecord] = {}
        skipped = pairing.tally.skipped
        pairing.set_indexes(
            [_index_files(session, files, skipped, records) for files in pairing.file_groups]
        )
        for part in session.map(_pair_tasks, _pair_jobs(session, request, pairing)):
            part.append_to(pairing.output.rows)
            pairing.tally.merge(part.tally)
        return pairing.finish([records[file] for file in pairing.files])


def _index_files(
    session: RaySession, files: list[Path], skipped: Counter[str], records: dict[Path, FileRecord]
) -> TaskIndex:
    """Returns one index of all files; adds to `skipped` and `records`."""
    index: TaskIndex = {}
    indexes = session.map(_index_file, ((path,) for path in files))
    for path, (rollouts, left_out, record) in zip(files, indexes, strict=True):
        for task_id, entries in rollouts.items():
            index.setdefault(task_id, []).extend(entries)
        skipped.update(left_out)
        records[path] = record
    return index


def _index_file(path: Path) -> tuple[TaskIndex, Counter[str], FileRecord]:
    skipped: Counter[str] = Counter()
    return index_rollouts([path], skipped), skipped, record_file(path)


_Task = tuple[str, list[IndexedRollout], list[IndexedRollout] | None]
"""A task id with the better and the worse rollouts; None: pair the better ones with each other."""


def _pair_jobs(
    session: RaySession, request: MakeDpoPairs, pairing: Pairing
) -> Iterator[tuple[MakeDpoPairs, list[_Task], Path, ProjectTools]]:
    """Yields the arguments of `_pair_tasks` for each batch of tasks."""
    worse = None if pairing.worse is pairing.better else pairing.worse
    tasks: list[_Task] = []
    size = number = 0
    for task_id, entries in pairing.better.items():
        others = None if worse is None else worse.get(task_id, [])
        tasks.append((task_id, entries, others))
        size += len(entries) + len(others or ())
        if size >= _ROLLOUTS_PER_JOB:
            yield request, tasks, session.path(number), pairing.tools
            tasks, size, number = [], 0, number + 1
    if tasks:
        yield request, tasks, session.path(number), pairing.tools


def _pair_tasks(
    request: MakeDpoPairs, tasks: list[_Task], path: Path, tools: ProjectTools
) -> WrittenPart[PairTally]:
    tally = PairTally()
    with atomic_output(path) as rows, PairReader() as reader:
        writer = PairWriter(request, tally, reader, rows, tools=tools)
        for task_id, better, worse in tasks:
            writer.write_task(task_id, better, better if worse is None else worse)
    return WrittenPart(path, rows.num_rows, tally)

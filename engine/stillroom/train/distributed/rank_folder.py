"""The rank folder: files by which a run and its training processes communicate; needs no torch.

The run owns its state and metrics. Its ranks (the processes) read the job, rank 0 writes reports,
and each rank writes how it ended. All of them see the folder under the same path.
"""

import math
import os
import platform
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import DivergedError, EngineError, RunError
from stillroom.files import write_json
from stillroom.lines import NewLines, last_line
from stillroom.processes import process_start
from stillroom.reporting import Reporter

FOLDER = "ranks"
RANK_MODULE = "stillroom.train.rank_main"
"""The Python module that each rank runs."""
_POLL_S = 0.2
_END_WAIT_S = 5.0
_RUN_GONE = 70
"""The exit code of a rank whose run is gone."""


class RanksFailedError(Exception):
    """Some ranks failed; `endings` has how each one ended as the launcher saw it, by rank."""

    def __init__(self, endings: dict[int, str]) -> None:
        super().__init__(endings)
        self.endings = endings


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process that owns the run; its start time detects a reused pid."""

    host: str
    pid: int
    start: str


class RankJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of the ranks: the request to train, its workspace and run, and the run's owner."""

    workspace: str
    request: dict[str, Any]
    run: str
    is_sharded: bool
    owner: Owner
    version: str


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a rank: an EngineError with its fix, or any other error without one."""

    kind: str
    problem: str
    fix: str | None = None
    errno: int | None = None

    def error(self, rank: int, size: int) -> BaseException:
        """Returns the error as the run's own process would have raised it."""
        if self.fix is not None:
            error_class = DivergedError if self.kind == DivergedError.__name__ else EngineError
            return error_class(self.problem, self.fix)
        problem = f"{self.problem} (rank {rank} of {size} processes)"
        if self.errno is not None:
            return OSError(self.errno, problem)
        return RuntimeError(f"{self.kind}: {problem}")


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a rank: a result, a cancellation or a failure."""

    time: float
    result: dict[str, Any] | None = None
    is_cancelled: bool = False
    failure: RankFailure | None = None


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a rank: its machine, its process id and the number of ranks."""

    host: str
    pid: int
    size: int


class _Report(msgspec.Struct, kw_only=True):
    """One line of rank 0's reports.jsonl: a note, alarms, metrics or progress."""

    note: str | None = None
    alarms: list[str] | None = None
    step: int | None = None
    values: dict[str, float | None] = {}
    done: int | None = None
    total: int = 0
    unit: str = ""
    phase: str = ""
    eta_s: float | None = None


class RankFiles:
    """The files in the rank folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job.json"
        self.reports = folder / "reports.jsonl"
        self.stop = folder / "stop"
        self.abandoned = folder / "abandoned"

    def read_job(self) -> RankJob:
        """Returns the job. Raises RunError on a machine that does not see the folder."""
        try:
            return msgspec.json.decode(self.job.read_bytes(), type=RankJob)
        except FileNotFoundError as error:
            raise RunError(
                f"{self.folder} does not exist on {platform.node()!r}",
                "keep the workspace on a file system that all machines mount at the same path",
            ) from error

    def log_file(self, rank: int) -> Path:
        """Returns the path of a rank's log."""
        return self.folder / f"rank_{rank}.log"

    def record_start(self, rank: int, size: int) -> None:
        """Records that this process has started as a rank."""
        start = RankStart(host=platform.node(), pid=os.getpid(), size=size)
        write_json(self.folder / f"rank_{rank}.json", start)

    def record_end(self, rank: int, end: RankEnd) -> None:
        """Records how a rank ended."""
        write_json(self.folder / f"rank_{rank}.end.json", end)

    def starts(self) -> dict[int, RankStart]:
        """Returns the start of each rank that has started, by rank."""
        files = {p for p in self.folder.glob("rank_*.json") if p.suffixes == [".json"]}
        return {_rank_of(p): msgspec.json.decode(p.read_bytes(), type=RankStart) for p in files}

    def ends(self) -> dict[int, RankEnd]:
        """Returns the end of each rank that has ended, by rank."""
        files = self.folder.glob("rank_*.end.json")
        return {_rank_of(p): msgspec.json.decode(p.read_bytes(), type=RankEnd) for p in files}


def this_process() -> Owner:
    """Returns this process as the owner of a run."""
    pid = os.getpid()
    return Owner(host=platform.node(), pid=pid, start=process_start(pid) or "")


class RankReporter:
    """The reporter of a rank: rank 0 writes reports; every rank sees a cancellation."""

    def __init__(self, files: RankFiles, *, is_first: bool) -> None:
        self._files, self._is_first = files, is_first

    def progress(
        self, done: int, total: int, *, unit: str, phase: str, eta_s: float | None = None
    ) -> None:
        """Reports the progress of the current phase."""
        self._report(_Report(done=done, total=total, unit=unit, phase=phase, eta_s=eta_s))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Reports the metrics of a step; NaN is written as null, as JSON has no NaN."""
        self._report(_Report(step=step, values=dict(values)))

    def note(self, text: str) -> None:
        """Reports a note."""
        self._report(_Report(note=text))

    def alarms(self, current: Sequence[str]) -> None:
        """Reports the current alarms, which replace those of the previous step."""
        self._report(_Report(alarms=list(current)))

    def is_cancelled(self) -> bool:
        """Returns whether the run has been cancelled."""
        return self._files.stop.exists()

    def _report(self, report: _Report) -> None:
        if self._is_first:
            with self._files.reports.open("ab", buffering=0) as stream:
                stream.write(msgspec.json.encode(report) + b"\n")


@contextmanager
def relay_rank_reports(files: RankFiles, reporter: Reporter) -> Generator[None]:
    """Relays rank 0's reports to the run, and the run's cancellation to the ranks.

    A thread does this until the block ends; ranks that are still running then exit.
    """
    ended = threading.Event()
    tail = NewLines(files.reports)

    def relay_until_end() -> None:
        while not ended.wait(_POLL_S):
            _relay(tail, reporter)
            if reporter.is_cancelled() and not files.stop.exists():
                files.stop.touch()

    thread = threading.Thread(target=relay_until_end, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_WAIT_S)
        files.abandoned.touch()
        _relay(tail, reporter)


def _relay(tail: NewLines, reporter: Reporter) -> None:
    """Passes rank 0's new reports on to the run's reporter."""
    for line in tail.read():
        report = msgspec.json.decode(line, type=_Report)
        if report.note is not None:
            reporter.note(report.note)
        if report.alarms is not None:
            reporter.alarms(report.alarms)
        if report.step is not None:
            values = {k: math.nan if v is None else v for k, v in report.values.items()}
            reporter.metrics(report.step, values)
        if report.done is not None:
            reporter.progress(
                report.done,
                report.total,
                unit=report.unit,
                phase=report.phase,
                eta_s=report.eta_s,
            )


def watch_owner(files: RankFiles, owner: Owner) -> None:
    """Starts a thread that exits this process once the run that it trains for is gone."""

    def watch() -> None:
        while _is_run_alive(files, owner):
            time.sleep(_POLL_S)
        # Not sys.exit: the main thread may be blocked in a collective operation.
        os._exit(_RUN_GONE)

    threading.Thread(target=watch, daemon=True).start()


def _is_run_alive(files: RankFiles, owner: Owner) -> bool:
    """Returns whether the run still exists; from another machine only its folder shows it."""
    if files.abandoned.exists() or not files.folder.exists():
        return False
    if owner.host != platform.node():
        return True
    return process_start(owner.pid) == owner.start


def failure_of_ranks(files: RankFiles, endings: Mapping[int, str]) -> BaseException:
    """Returns the error that made the ranks fail.

    endings: how ranks ended as the launcher saw it, by rank. A rank that did not record its own
    end is reported first, because its loss made the others fail.
    """
    starts, ends = files.starts(), files.ends()
    unrecorded = [rank for rank in endings if rank not in ends]
    if unrecorded:
        return _lost_error(files, unrecorded[0], endings[unrecorded[0]], starts)
    failed = [(end.time, rank) for rank, end in ends.items() if end.failure is not None]
    if failed:
        rank = min(failed)[1]
        failure = ends[rank].failure
        if failure is not None:
            return failure.error(rank, starts[rank].size if rank in starts else len(ends))
    return RunError(
        "the training processes exited without a result",
        f"read their logs in {files.folder}",
    )


def _lost_error(
    files: RankFiles, rank: int, ending: str, starts: Mapping[int, RankStart]
) -> RunError:
    """Returns the error for a rank that ended without recording how, with its log's last line."""
    start = starts.get(rank)
    name = f"rank {rank}"
    if start is not None:
        name += f" of {start.size} processes (pid {start.pid} on {start.host})"
    log_end = last_line(files.log_file(rank))
    return RunError(
        f"{name} {ending}" + (f"; its log ends with: {log_end}" if log_end else ""),
        f"read {files.log_file(rank)}; if it ran out of memory, lower model.microbatch_tokens, "
        "train an adapter (model.qlora_rank), or split the weights (launcher.strategy: fsdp2)",
    )


def _rank_of(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("rank_"))

"""The folder through which a run and the processes that train for it speak; needs no torch.

The run owns its state and metrics. Its ranks (the processes) read what to do, the first of them
tells how far it is, and each says how it ended. All of them see the folder under the same path.
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
import psutil

from stillroom.errors import DivergedError, EngineError, RunError
from stillroom.files import write_json
from stillroom.reporting import Reporter

FOLDER = "ranks"
_POLL_S = 0.2
_LEFT_ALONE = 70
"""Exit code of a rank whose run is gone."""
_LAST_WORDS = 300


class RanksFailedError(Exception):
    """Processes ended that should not have; `lost` says how those did that the launcher saw."""

    def __init__(self, lost: dict[int, str]) -> None:
        super().__init__(lost)
        self.lost = lost


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process of the run."""

    host: str
    pid: int
    started_at: float


class RankJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks are to do."""

    workspace: str
    request: dict[str, Any]
    run: str
    is_sharded: bool
    owner: Owner
    version: str


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What ended a rank: an error that says what to do, or any other."""

    kind: str
    problem: str
    fix: str | None = None
    errno: int | None = None

    def error(self, rank: int, size: int) -> BaseException:
        """Returns the error as the run's own process would have had it."""
        if self.fix is not None:
            family = DivergedError if self.kind == DivergedError.__name__ else EngineError
            return family(self.problem, self.fix)
        told = f"{self.problem} (process {rank} of {size})"
        if self.errno is not None:
            return OSError(self.errno, told)
        return RuntimeError(f"{self.kind}: {told}")


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended: with a result, stopped as it was asked to, or with a failure."""

    time: float
    result: dict[str, Any] | None = None
    is_cancelled: bool = False
    failure: RankFailure | None = None


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs."""

    host: str
    pid: int
    size: int


class _Report(msgspec.Struct, kw_only=True):
    """One thing that the first rank tells."""

    note: str | None = None
    alarms: list[str] | None = None
    step: int | None = None
    values: dict[str, float | None] = {}
    done: int | None = None
    total: int = 0
    unit: str = ""
    phase: str = ""


class RankFiles:
    """The files of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job.json"
        self.reports = folder / "reports.jsonl"
        self.stop = folder / "stop"
        self.abandoned = folder / "abandoned"

    def read_job(self) -> RankJob:
        """Returns what the ranks are to do. Raises RunError where the folder is not to be seen."""
        try:
            return msgspec.json.decode(self.job.read_bytes(), type=RankJob)
        except FileNotFoundError as error:
            raise RunError(
                f"{self.folder} is not on {platform.node()!r}",
                "keep the workspace on a file system that all machines have under the same path",
            ) from error

    def log(self, rank: int) -> Path:
        """Returns where a rank's output goes."""
        return self.folder / f"rank_{rank}.log"

    def begin(self, rank: int, size: int) -> None:
        """Says where a rank runs."""
        start = RankStart(host=platform.node(), pid=os.getpid(), size=size)
        write_json(self.folder / f"rank_{rank}.json", start)

    def end(self, rank: int, end: RankEnd) -> None:
        """Says how a rank ended."""
        write_json(self.folder / f"rank_{rank}.end.json", end)

    def starts(self) -> dict[int, RankStart]:
        """Returns where the ranks run or ran."""
        found = {p for p in self.folder.glob("rank_*.json") if p.suffixes == [".json"]}
        return {_rank_of(p): msgspec.json.decode(p.read_bytes(), type=RankStart) for p in found}

    def ends(self) -> dict[int, RankEnd]:
        """Returns how ranks ended."""
        found = self.folder.glob("rank_*.end.json")
        return {_rank_of(p): msgspec.json.decode(p.read_bytes(), type=RankEnd) for p in found}

    def last_words(self, rank: int) -> str:
        """Returns the end of a rank's output; "" if there is none."""
        if not self.log(rank).exists():
            return ""
        lines = self.log(rank).read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip()[:_LAST_WORDS] if lines else ""


def this_process() -> Owner:
    """Returns the run's own process, which is this one."""
    process = psutil.Process()
    return Owner(host=platform.node(), pid=process.pid, started_at=process.create_time())


class RankReporter:
    """Tells the run what the first rank has to say; of the others it only hears whether to stop."""

    def __init__(self, files: RankFiles, *, is_first: bool) -> None:
        self._files, self._is_first = files, is_first

    def progress(self, done: int, total: int, *, unit: str, phase: str) -> None:
        """Tells how far the run is."""
        self._tell(_Report(done=done, total=total, unit=unit, phase=phase))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Tells measured values of a step; JSON has no NaN."""
        self._tell(_Report(step=step, values=dict(values)))

    def note(self, text: str) -> None:
        """Tells a note."""
        self._tell(_Report(note=text))

    def alarms(self, current: Sequence[str]) -> None:
        """Tells what is wrong now."""
        self._tell(_Report(alarms=list(current)))

    def is_cancelled(self) -> bool:
        """Returns whether the run has been asked to stop."""
        return self._files.stop.exists()

    def _tell(self, report: _Report) -> None:
        if self._is_first:
            with self._files.reports.open("ab", buffering=0) as stream:
                stream.write(msgspec.json.encode(report) + b"\n")


@contextmanager
def following(files: RankFiles, reporter: Reporter) -> Generator[None]:
    """Hands on, from a thread, what the first rank tells, and to the ranks that they are to stop.

    Ranks that are left when this ends are told to go.
    """
    ended = threading.Event()
    tail = _Tail(files.reports)

    def follow() -> None:
        while not ended.wait(_POLL_S):
            _hand_on(tail, reporter)
            if reporter.is_cancelled() and not files.stop.exists():
                files.stop.touch()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        files.abandoned.touch()
        _hand_on(tail, reporter)


class _Tail:
    """The whole lines that a file has got since it was last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def take(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.splitlines()


def _hand_on(tail: _Tail, reporter: Reporter) -> None:
    for line in tail.take():
        report = msgspec.json.decode(line, type=_Report)
        if report.note is not None:
            reporter.note(report.note)
        if report.alarms is not None:
            reporter.alarms(report.alarms)
        if report.step is not None:
            values = {k: math.nan if v is None else v for k, v in report.values.items()}
            reporter.metrics(report.step, values)
        if report.done is not None:
            reporter.progress(report.done, report.total, unit=report.unit, phase=report.phase)


def watch_owner(files: RankFiles, owner: Owner) -> None:
    """Ends this process, from a thread, once the run that it trains for is gone."""

    def watch() -> None:
        while _is_wanted(files, owner):
            time.sleep(_POLL_S)
        # Whatever the others wait for, nobody wants it any more.
        os._exit(_LEFT_ALONE)

    threading.Thread(target=watch, daemon=True).start()


def _is_wanted(files: RankFiles, owner: Owner) -> bool:
    if files.abandoned.exists() or not files.folder.exists():
        return False
    if owner.host != platform.node():
        return True
    try:
        process = psutil.Process(owner.pid)
        is_same = process.create_time() == owner.started_at
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def what_failed(files: RankFiles, lost: Mapping[int, str]) -> BaseException:
    """Returns why the ranks failed; `lost` are those of which the launcher saw the end, and how.

    One that is lost without a word comes first: the others fail because of it.
    """
    starts, ends = files.starts(), files.ends()
    silent = [rank for rank in lost if rank not in ends]
    if silent:
        return _lost_error(files, silent[0], lost[silent[0]], starts)
    failed = [(end.time, rank) for rank, end in ends.items() if end.failure is not None]
    if failed:
        rank = min(failed)[1]
        failure = ends[rank].failure
        if failure is not None:
            return failure.error(rank, starts[rank].size if rank in starts else len(ends))
    return RunError(
        "the training processes ended without a result",
        f"read their logs in {files.folder}",
    )


def _lost_error(files: RankFiles, rank: int, how: str, starts: Mapping[int, RankStart]) -> RunError:
    start = starts.get(rank)
    who = f"process {rank}"
    if start is not None:
        who += f" of {start.size} (pid {start.pid} on {start.host})"
    words = files.last_words(rank)
    return RunError(
        f"{who} {how}" + (f"; its log ends with: {words}" if words else ""),
        f"read {files.log(rank)}; if it was killed for memory, lower model.microbatch_tokens, "
        "train an adapter (model.qlora_rank), or split the weights (launcher.strategy: fsdp2)",
    )


def _rank_of(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("rank_"))

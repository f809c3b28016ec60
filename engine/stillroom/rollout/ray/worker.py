"""A Ray worker's part of a rollout run: one shard, done as `generate_rollouts` does a whole run."""

import functools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from stillroom import __version__
from stillroom.errors import EngineError, RunCancelledError, RunError
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.journal.shards import RunPart
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import RolloutsResult
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget, Cost


@dataclass(frozen=True, slots=True)
class ShardJob:
    """What a worker is told to do."""

    workspace: str
    request: dict[str, Any]
    folder: str
    keys: tuple[RolloutKey, ...]
    usd: float
    tokens: float
    minutes: float
    version: str


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """How a worker's work ended: with a result, or with what stops the run."""

    result: RolloutsResult | None
    spent: Cost
    """What counts against the budget, calls that broke off included."""
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far a worker is."""

    figures: Mapping[str, float]
    notes: tuple[str, ...]


class ShardWorker:
    """The actor of a shard. `run` works in one thread, the others answer beside it."""

    def __init__(self) -> None:
        self._reporter = _KeptReports()

    def run(self, job: ShardJob) -> ShardEnd:
        """Does the shard; returns how it ended."""
        budget = Budget(usd=job.usd, tokens=job.tokens, minutes=job.minutes)
        try:
            _check_place(job)
            work = functools.partial(
                generate_rollouts,
                folder=Path(job.folder),
                reporter=self._reporter,
                part=RunPart(frozenset(job.keys), budget),
            )
            request = GenerateRollouts.model_validate(job.request)
            result: Any = anyio.run(work, Workspace(Path(job.workspace)), request)
        except RunCancelledError as cancelled:
            result = cancelled.result
        except EngineError as error:
            return ShardEnd(None, budget.spent, error)
        except BaseExceptionGroup as group:
            stopping = group.subgroup(EngineError)
            if stopping is None:
                raise
            return ShardEnd(None, budget.spent, _first(stopping))
        return ShardEnd(result, budget.spent)

    def progress(self) -> WorkerProgress:
        """Returns how far the work is."""
        return WorkerProgress(dict(self._reporter.figures), tuple(self._reporter.notes))

    def cancel(self) -> None:
        """Asks the work to stop."""
        self._reporter.stop()


class _KeptReports:
    """Keeps what a run tells until the driver asks for it."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.notes: list[str] = []
        self._is_stopped = False

    def progress(self, done: int, total: int, *, unit: str, phase: str) -> None:
        """Says nothing: the driver counts rows and failures itself."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the latest values."""
        self.figures = dict(values)

    def note(self, text: str) -> None:
        """Keeps a note."""
        self.notes.append(text)

    def alarms(self, current: Sequence[str]) -> None:
        """Has none: only training tells of such."""

    def stop(self) -> None:
        """Makes `is_cancelled` True."""
        self._is_stopped = True

    def is_cancelled(self) -> bool:
        """Returns whether the run has been asked to stop."""
        return self._is_stopped


def _check_place(job: ShardJob) -> None:
    """Raises RunError where the worker has not the driver's files or not its version."""
    if not Path(job.folder).parent.is_dir():
        raise RunError(
            f"the workspace {job.workspace!r} of the driver is not on the Ray node "
            f"{platform.node()!r}",
            "keep the workspace on a file system that all nodes have under the same path",
        )
    if job.version != __version__:
        raise RunError(
            f"the Ray node {platform.node()!r} has stillroom {__version__}, the driver "
            f"{job.version}",
            "install the same version on all nodes",
        )


def _first(error: BaseException) -> EngineError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, EngineError) else RunError(str(error), "see the run's log")

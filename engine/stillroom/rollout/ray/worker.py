"""The Ray worker of a rollout run, which does one shard with `generate_rollouts`."""

import functools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """The job of one worker: a request, the rollouts to do of it, and a share of the budget."""

    workspace: str
    """The path of the driver's workspace, which the worker's node must have too."""
    request: dict[str, Any]
    """The JSON form of a `GenerateRollouts` with the shard's own output and concurrency."""
    folder: str
    """The path of the shard's run folder."""
    keys: tuple[RolloutKey, ...]
    usd: float
    tokens: float
    minutes: float
    version: str
    """The driver's version of stillroom, which the worker must have too."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """The secrets of MCP servers' command lines; keys of endpoints are not sent."""


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """The outcome of a worker's job: a result, or the error that stops the run."""

    result: RolloutsResult | None
    spent: Cost
    """The amount that counts against the budget, including calls that broke off."""
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The latest figures of a worker, and its notes so far."""

    figures: Mapping[str, float]
    notes: tuple[str, ...]


class ShardWorker:
    """The Ray actor of a shard; other threads answer its other methods while `run` works."""

    def __init__(self) -> None:
        self._reporter = _KeptReports()

    def run(self, job: ShardJob) -> ShardEnd:
        """Does the shard and returns how it ended."""
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
            result: Any = anyio.run(work, Workspace(Path(job.workspace), job.secrets), request)
        except RunCancelledError as cancelled:
            result = cancelled.result
        except EngineError as error:
            return ShardEnd(None, budget.spent, error)
        except BaseExceptionGroup as group:
            # An error raised inside a task group arrives wrapped in exception groups.
            stopping = group.subgroup(EngineError)
            if stopping is None:
                raise
            return ShardEnd(None, budget.spent, _engine_error_in(stopping))
        return ShardEnd(result, budget.spent)

    def progress(self) -> WorkerProgress:
        """Returns the latest figures and all notes."""
        return WorkerProgress(dict(self._reporter.figures), tuple(self._reporter.notes))

    def cancel(self) -> None:
        """Asks `run` to stop; it then records the calls in flight and ends."""
        self._reporter.stop()


class _KeptReports:
    """A reporter that keeps a run's figures and notes until the driver asks for them."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.notes: list[str] = []
        self._is_stopped = False

    def progress(self, done: int, total: int, *, unit: str, phase: str) -> None:
        """Does nothing: the driver counts rows and failures itself."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the latest values."""
        self.figures = dict(values)

    def note(self, text: str) -> None:
        """Keeps a note."""
        self.notes.append(text)

    def alarms(self, current: Sequence[str]) -> None:
        """Does nothing: only training has alarms."""

    def stop(self) -> None:
        """Makes `is_cancelled` return True from now on."""
        self._is_stopped = True

    def is_cancelled(self) -> bool:
        """Returns whether the run has been asked to stop."""
        return self._is_stopped


def _check_place(job: ShardJob) -> None:
    """Raises RunError if the worker lacks the driver's files or has another version."""
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


def _engine_error_in(error: BaseException) -> EngineError:
    """Returns the first error inside nested exception groups, as task groups raise them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, EngineError) else RunError(str(error), "see the run's log")

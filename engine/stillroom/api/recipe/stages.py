"""Carries out the stages of a recipe as ordinary runs, or takes over runs that did them before.

A stage that an earlier call of the recipe has finished is recognised by its run: the same operation
and request, on files that have not changed since. What the recipe has cost is what all runs on
files of its folder have cost, so nothing is forgotten when it is interrupted or its data change.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel

from stillroom.api.curation import carry_out
from stillroom.api.operations import operation_named
from stillroom.api.runs import GetRun, RunReport, get_run
from stillroom.errors import DataError, RunCancelledError, RunError
from stillroom.jobs import supervise
from stillroom.jobs.failures import resume_hint
from stillroom.jobs.operations import Operation
from stillroom.lineage import is_as_recorded, read_manifest
from stillroom.recipe.request import StageRun
from stillroom.reporting import Reporter
from stillroom.run_folder import RunFolder, RunRequest, all_runs, find_run
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining
from stillroom.types import RunKind, RunStatus

_POLL_S = 0.5
_CANCEL_WAIT_S = 60.0
_LIMITS = ("budget_usd", "max_minutes")
"""Options that do not change what a run does, but how far it comes."""
_Result = TypeVar("_Result", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RecipeLimits:
    """What bounds the stages of a recipe."""

    folder: Path
    """The folder with the recipe's files."""
    minutes: float | None
    since: str
    """When a call first had as much money and time; what a limit ended earlier may go on."""


class Stages:
    """The stages of one recipe: starts and follows their runs, and adds up time and money."""

    def __init__(
        self, workspace: Workspace, reporter: Reporter, titles: Sequence[str], limits: RecipeLimits
    ) -> None:
        self.done: list[StageRun] = []
        """The runs of this recipe's stages so far, in order."""
        self._workspace, self._reporter, self._titles = workspace, reporter, titles
        self._limits, self._started = limits, time.monotonic()
        self.unreadable: list[str] = []
        """The earlier runs whose run.json is damaged; all of their budgets count as spent."""
        self._usd: dict[str, float] = {}
        """What each run on files of the recipe's folder has cost, by its id."""
        self._earlier_s = 0.0
        for folder in all_runs(workspace):
            recorded = folder.known_request()
            if recorded is None or not self._is_of_recipe(recorded):
                continue
            try:
                state = folder.read()
            except (DataError, OSError):
                self.unreadable.append(folder.run_id)
                self._usd[folder.run_id] = recorded.request.get("budget_usd") or 0.0
                continue
            self._usd[folder.run_id] = state.calls_usd
            self._earlier_s += state.seconds or 0.0

    @property
    def spent_usd(self) -> float:
        """What all calls of the recipe have cost, in US dollars, with what may still be billed."""
        return sum(self._usd.values())

    @property
    def seconds(self) -> float:
        """The seconds of this call, and those of the runs of earlier calls."""
        return time.monotonic() - self._started + self._earlier_s

    @property
    def left_s(self) -> float | None:
        """The seconds that are left of the recipe's time; None without a limit."""
        minutes = self._limits.minutes
        return None if minutes is None else minutes * 60 - self.seconds

    def _is_of_recipe(self, recorded: RunRequest) -> bool:
        """Returns whether a run reads or writes files of the recipe's folder."""
        if recorded.kind is RunKind.RECIPE:
            return False
        names = (recorded.request.get(field) for field in ("output", "data", "config"))
        paths = (self._workspace.path(name) for name in names if isinstance(name, str))
        return any(path.is_relative_to(self._limits.folder) for path in paths)

    def run(
        self, title: str, name: str, request: BaseModel, *, limit_s: float | None = None
    ) -> RunReport:
        """Does a stage with the operation of this name, which starts a run; returns its end.

        limit_s: the seconds after which the run is cancelled; None: it has a limit of its own.
        Raises RunError if the run fails or is cancelled, and RunCancelledError if the recipe is.
        """
        operation = operation_named(name)
        before = list(self._runs_of(operation, request))
        report = self._taken_over(before)
        if report is None:
            resumed = self._resumed(request, before)
            report = cast("RunReport", carry_out(self._workspace, operation, resumed))
        if not report.status.is_final:
            report = self._follow(title, report, limit_s)
        self._count(title, find_run(self._workspace, report.run_id))
        if report.status is not RunStatus.SUCCEEDED:
            problem = report.error.problem if report.error else f"the run was {report.status}"
            fix = report.error.fix if report.error else "start it again"
            if any(limit in problem for limit in _LIMITS):
                fix = "raise budget_usd or minutes of the recipe, of which a stage has a share"
            raise RunError(f"{title} ({report.run_id}): {problem}", fix)
        return report

    def do(self, title: str, name: str, request: BaseModel, result: type[_Result]) -> _Result:
        """Does a stage with an operation that returns its result, or becomes a run."""
        self._report(title, "")
        operation = operation_named(name)
        answer = self._running(operation, request)
        if answer is None:
            answer = carry_out(self._workspace, operation, request)
        if isinstance(answer, RunReport):
            ended = self._follow(title, answer)
            if ended.status is not RunStatus.SUCCEEDED or ended.result is None:
                problem = ended.error.problem if ended.error else f"the run was {ended.status}"
                raise RunError(f"{title} ({ended.run_id}): {problem}", "start the recipe again")
            return msgspec.convert(ended.result, result)
        return cast("_Result", answer)

    def result_of(self, name: str, request: BaseModel) -> dict[str, Any] | None:
        """Returns the result of the newest run that did a stage; None if none has succeeded."""
        newest = next(self._runs_of(operation_named(name), request), None)
        state = None if newest is None else supervise.read_run(newest)
        if state is None or state.status is not RunStatus.SUCCEEDED:
            return None
        return state.result or {}

    def note(self, text: str) -> None:
        """Records a text for the user."""
        self._reporter.note(text)

    def _running(self, operation: Operation, request: BaseModel) -> RunReport | None:
        """Returns the run that is doing a stage since an earlier call of the recipe; None if none.

        It writes the stage's output, so a second one would be refused.
        """
        for folder in self._runs_of(operation, request) if operation.large is not None else ():
            if not supervise.read_run(folder).status.is_final:
                return get_run(self._workspace, GetRun(run_id=folder.run_id))
        return None

    def _runs_of(self, operation: Operation, request: BaseModel) -> Iterator[RunFolder]:
        """Yields the runs of a stage on unchanged files, and those that resumed them, newest first.

        Their limits may have been others.
        """
        kinds = set() if operation.run is None else set(map(str, operation.run.kinds))
        if operation.large is not None:
            kinds.add(str(operation.large))
        wanted = _without_limits(request.model_dump(mode="json"))
        found: list[tuple[str, RunFolder]] = []
        for folder in all_runs(self._workspace):
            if folder.run_id.partition("-")[0] not in kinds:
                continue
            first = [folder, *folder.earlier_runs()][-1]
            recorded = first.known_request()
            if recorded is None or _without_limits(recorded.request) != wanted:
                continue
            try:
                first.check_inputs()
                found.append((folder.read().created_at, folder))
            # The files have changed, or its run.json is damaged, so it did another stage.
            except (RunError, DataError, OSError):
                continue
        yield from (folder for _, folder in sorted(found, key=lambda pair: pair[0], reverse=True))

    def _taken_over(self, runs: Sequence[RunFolder]) -> RunReport | None:
        """Returns the newest run of a stage if it did all of it or is still doing it, else None.

        A run that a limit ended has done all of it, but for rollouts under limits since raised.
        """
        if not runs:
            return None
        state = supervise.read_run(runs[0])
        if state.status is RunStatus.SUCCEEDED:
            result = state.result or {}
            # Only rollouts go on without paying for anything again.
            may_go_on = state.kind is RunKind.ROLLOUTS and state.created_at < self._limits.since
            if may_go_on and result.get("stopped_by") in _LIMITS:
                return None
            checkpoint = result.get("checkpoint")
            if isinstance(checkpoint, str) and not self._workspace.path(checkpoint).exists():
                return None
            if not self._is_intact(result.get("output"), runs[0].run_id):
                return None
        elif state.status.is_final:
            return None
        return get_run(self._workspace, GetRun(run_id=runs[0].run_id))

    def _is_intact(self, output: object, run_id: str) -> bool:
        """Returns whether what a run wrote is still there, and no later run has replaced it."""
        if not isinstance(output, str):
            return True
        path = self._workspace.path(output)
        manifest = read_manifest(path) if path.exists() else None
        if manifest is None or path.is_dir():
            return manifest is not None and manifest.run_id == run_id
        return is_as_recorded(path, manifest.output)

    def _resumed(self, request: BaseModel, before: Sequence[RunFolder]) -> BaseModel:
        """Returns a training's request so that it resumes the newest run with a checkpoint."""
        if not isinstance(request, StartTraining):
            return request
        for folder in before:
            if resume_hint(folder, RunKind(folder.run_id.partition("-")[0])):
                left = self.left_s
                limit = () if left is None else (f"trainer.max_minutes={max(0.1, left / 60):.2f}",)
                return StartTraining(resume=folder.run_id, overrides=limit)
        return request

    def _count(self, title: str, folder: RunFolder) -> None:
        """Adds a run that has ended to `done` and to the costs."""
        state = folder.read()
        usd, seconds = state.calls_usd, round(state.seconds or 0.0, 1)
        self._usd[folder.run_id] = usd
        # A later stage may take over an earlier one's run.
        if folder.run_id not in {stage.run_id for stage in self.done}:
            self.done.append(StageRun(stage=title, run_id=folder.run_id, seconds=seconds, usd=usd))
        self._reporter.metrics(len(self.done), {"spent_usd": self.spent_usd})

    def _follow(self, title: str, report: RunReport, limit_s: float | None = None) -> RunReport:
        """Waits for the end of a run while reporting its progress; cancels it after `limit_s`.

        If the recipe is cancelled, the run is cancelled too, and RunCancelledError is raised once
        it has ended or a minute has passed.
        """
        cancelled_at: float | None = None
        begun = time.monotonic()
        while not report.status.is_final:
            is_late = limit_s is not None and time.monotonic() - begun > limit_s
            if self._reporter.is_cancelled() or is_late:
                cancelled_at = cancelled_at or time.monotonic()
                supervise.cancel_run(find_run(self._workspace, report.run_id))
                if time.monotonic() - cancelled_at > _CANCEL_WAIT_S:
                    break
            progress = report.progress
            self._report(title, f" {progress.done}/{progress.total}" if progress else "")
            time.sleep(_POLL_S)
            report = get_run(self._workspace, GetRun(run_id=report.run_id))
        if self._reporter.is_cancelled():
            raise RunCancelledError
        if cancelled_at is not None:
            raise RunError(
                f"{title} ({report.run_id}) was stopped after {limit_s:.0f} seconds, its share of "
                "the recipe's time",
                "give the recipe more time (minutes), or fewer labelled texts",
            )
        return report

    def _report(self, title: str, details: str) -> None:
        number = self._titles.index(title)
        phase = f"{title}{details}"
        self._reporter.progress(number, len(self._titles), unit="stages", phase=phase)


def _without_limits(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in _LIMITS}

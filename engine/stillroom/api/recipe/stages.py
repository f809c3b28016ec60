"""Carries out the stages of a recipe as ordinary runs, or takes over runs that did them before.

A stage that an earlier call of the recipe has finished is recognised by its run: the same operation
and request, on files that have not changed since. So a recipe needs no record of its own, and goes
on after any interruption.
"""

import time
from collections.abc import Iterator, Sequence
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
from stillroom.recipe.request import StageRun
from stillroom.reporting import Reporter
from stillroom.run_folder import RunFolder, all_runs, find_run
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining
from stillroom.types import RunKind, RunStatus

_POLL_S = 0.5
_CANCEL_WAIT_S = 60.0
_LIMITS = ("budget_usd", "max_minutes")
"""Options that do not change what a run does, but how far it comes."""
_Result = TypeVar("_Result", bound=msgspec.Struct)


class Stages:
    """The stages of one recipe: starts and follows their runs, and adds up time and money."""

    def __init__(
        self,
        workspace: Workspace,
        reporter: Reporter,
        titles: Sequence[str],
        *,
        minutes: float | None,
    ) -> None:
        self.done: list[StageRun] = []
        """The runs of the stages so far, in order."""
        self._workspace, self._reporter, self._titles = workspace, reporter, titles
        self._limit_s = None if minutes is None else minutes * 60
        self._started, self._earlier_s = time.monotonic(), 0.0

    @property
    def spent_usd(self) -> float:
        """What the runs of all stages have cost, in US dollars, with what may still be billed."""
        return sum(stage.usd for stage in self.done)

    @property
    def seconds(self) -> float:
        """The seconds of this call, and those that earlier calls spent on stages taken over."""
        return time.monotonic() - self._started + self._earlier_s

    @property
    def left_s(self) -> float | None:
        """The seconds that are left of the recipe's time; None without a limit."""
        return None if self._limit_s is None else self._limit_s - self.seconds

    def run(self, title: str, name: str, request: BaseModel) -> RunReport:
        """Does a stage with the operation of this name, which starts a run; returns its end.

        Raises RunError if the run fails, and RunCancelledError if the recipe is cancelled.
        """
        operation = operation_named(name)
        before = list(self._runs_of(operation, request))
        report = self._taken_over(before, request)
        if report is None:
            self._count_earlier(title, before)
            resumed = _resumed(request, before)
            report = cast("RunReport", carry_out(self._workspace, operation, resumed))
        elif report.status is RunStatus.SUCCEEDED:
            self._count_earlier(title, before)
            return report
        else:
            self._count_earlier(title, before[1:])
        report = self._follow(title, report)
        self._count(title, find_run(self._workspace, report.run_id))
        if report.status is not RunStatus.SUCCEEDED:
            problem = report.error.problem if report.error else f"the run was {report.status}"
            fix = report.error.fix if report.error else "start it again"
            raise RunError(f"{title} ({report.run_id}): {problem}", fix)
        return report

    def do(self, title: str, name: str, request: BaseModel, result: type[_Result]) -> _Result:
        """Does a stage with an operation that returns its result, or becomes a run."""
        self._report(title, "")
        answer = carry_out(self._workspace, operation_named(name), request)
        if isinstance(answer, RunReport):
            ended = self._follow(title, answer)
            if ended.status is not RunStatus.SUCCEEDED or ended.result is None:
                problem = ended.error.problem if ended.error else f"the run was {ended.status}"
                raise RunError(f"{title} ({ended.run_id}): {problem}", "start the recipe again")
            return msgspec.convert(ended.result, result)
        return cast("_Result", answer)

    def note(self, text: str) -> None:
        """Records a text for the user."""
        self._reporter.note(text)

    def _runs_of(self, operation: Operation, request: BaseModel) -> Iterator[RunFolder]:
        """Yields the runs of a stage on unchanged files, and those that resumed them, newest first.

        Their limits may have been others.
        """
        kinds = [str(kind) for kind in operation.run.kinds] if operation.run is not None else []
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
            # The files have changed, or its run.json is damaged: it is none of ours.
            except (RunError, DataError, OSError):
                continue
        yield from (folder for _, folder in sorted(found, key=lambda pair: pair[0], reverse=True))

    def _taken_over(self, runs: Sequence[RunFolder], request: BaseModel) -> RunReport | None:
        """Returns the newest run of a stage if it did all of it or is still doing it, else None."""
        if not runs:
            return None
        state = supervise.read_run(runs[0])
        if state.status is RunStatus.SUCCEEDED:
            result = state.result or {}
            output, limit = result.get("output"), result.get("stopped_by")
            is_there = not isinstance(output, str) or self._workspace.path(output).exists()
            recorded = runs[0].read_request().request
            may_go_on = limit is not None and getattr(request, limit, None) != recorded.get(limit)
            if not is_there or may_go_on:
                return None
        elif state.status.is_final:
            return None
        return get_run(self._workspace, GetRun(run_id=runs[0].run_id))

    def _count_earlier(self, title: str, runs: Sequence[RunFolder]) -> None:
        for folder in reversed(runs):
            self._earlier_s += self._count(title, folder)

    def _count(self, title: str, folder: RunFolder) -> float:
        """Adds a run to `done` and returns its seconds."""
        state = folder.read()
        result, seconds = state.result or {}, state.seconds or 0.0
        usd = result.get("cost_usd") or state.metrics.get("cost_usd") or 0.0
        usd += result.get("unconfirmed_usd") or 0.0
        self.done.append(
            StageRun(stage=title, run_id=folder.run_id, seconds=round(seconds, 1), usd=usd)
        )
        self._reporter.metrics(len(self.done), {"spent_usd": self.spent_usd})
        return seconds

    def _follow(self, title: str, report: RunReport) -> RunReport:
        """Waits for the end of a run while reporting its progress.

        If the recipe is cancelled, the run is cancelled too, and RunCancelledError is raised once
        it has ended or a minute has passed.
        """
        cancelled_at: float | None = None
        while not report.status.is_final:
            if self._reporter.is_cancelled():
                cancelled_at = cancelled_at or time.monotonic()
                supervise.cancel_run(find_run(self._workspace, report.run_id))
                if time.monotonic() - cancelled_at > _CANCEL_WAIT_S:
                    break
            progress = report.progress
            self._report(title, f" {progress.done}/{progress.total}" if progress else "")
            time.sleep(_POLL_S)
            report = get_run(self._workspace, GetRun(run_id=report.run_id))
        if cancelled_at is not None:
            raise RunCancelledError
        return report

    def _report(self, title: str, details: str) -> None:
        number = self._titles.index(title)
        phase = f"{title}{details}"
        self._reporter.progress(number, len(self._titles), unit="stages", phase=phase)


def _resumed(request: BaseModel, before: Sequence[RunFolder]) -> BaseModel:
    """Returns a training's request so that it resumes the newest run with a checkpoint, if any."""
    if not isinstance(request, StartTraining):
        return request
    for folder in before:
        if resume_hint(folder, RunKind(folder.run_id.partition("-")[0])):
            return StartTraining(resume=folder.run_id)
    return request


def _without_limits(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in _LIMITS}

"""Runs the stages of a recipe as ordinary runs, or reuses the runs of an earlier call.

A run is reused if it did the same operation and request on files that have not changed since. The
cost of a recipe is that of all runs on files of its folder, so that no cost is lost when the recipe
is interrupted or its data change.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel

from stillroom.api.curation import carry_out
from stillroom.api.operations import operation_named
from stillroom.api.runs import GetRun, RunReport, get_run
from stillroom.api.spending import (
    Output,
    has_budget_risen,
    journal_usd,
    output_of,
    recorded_path,
)
from stillroom.errors import DataError, RunCancelledError, RunError
from stillroom.jobs import supervise
from stillroom.jobs.failures import resume_hint
from stillroom.jobs.operations import Operation
from stillroom.lineage import matches_record, read_manifest
from stillroom.recipe.request import StageRun
from stillroom.reporting import Reporter
from stillroom.run_folder import RunFolder, RunRequest, RunState, all_runs, find_run
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining
from stillroom.types import RunKind, RunStatus

_POLL_S = 0.5
_CANCEL_WAIT_S = 60.0
_LIMIT_OPTIONS = ("budget_usd", "max_minutes")
"""Options that limit how much of its work a run does, but do not change the work."""
_Result = TypeVar("_Result", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RecipeLimits:
    """The limits of a recipe's stages, and the folder whose runs count towards them."""

    folder: Path
    """The folder with the recipe's files."""
    minutes: float | None
    since: str
    """When a call first had at least this much money and time; older rollouts may be resumed."""


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
        self._usd: dict[Output | None, dict[str, float]] = defaultdict(dict)
        """The reported cost of each run on files of the recipe's folder, by output and run id."""
        self._recorded_usd: dict[Output, float] = {}
        """The cost in an output's journal, for outputs of which a run ended without a result."""
        self._earlier_s = 0.0
        for folder in all_runs(workspace):
            recorded = folder.try_read_request()
            if recorded is None or not self._belongs_to_recipe(recorded):
                continue
            try:
                state = supervise.read_run(folder)
            except (DataError, OSError):
                self.unreadable.append(folder.run_id)
                self._usd[None][folder.run_id] = recorded.request.get("budget_usd") or 0.0
                continue
            self._add_cost(recorded, state)
            self._earlier_s += state.seconds or 0.0

    @property
    def spent_usd(self) -> float:
        """What all calls of the recipe have cost, in US dollars, with what may still be billed."""
        return sum(
            max(sum(runs.values()), self._recorded_usd.get(output, 0.0) if output else 0.0)
            for output, runs in self._usd.items()
        )

    @property
    def elapsed_s(self) -> float:
        """The seconds of this call, and those of the runs of earlier calls."""
        return time.monotonic() - self._started + self._earlier_s

    @property
    def remaining_s(self) -> float | None:
        """The seconds that are left of the recipe's time; None without a limit."""
        minutes = self._limits.minutes
        return None if minutes is None else minutes * 60 - self.elapsed_s

    def _belongs_to_recipe(self, recorded: RunRequest) -> bool:
        """Returns whether a run reads or writes files of the recipe's folder."""
        if recorded.kind is RunKind.RECIPE:
            return False
        names = (recorded.request.get(field) for field in ("output", "data", "config"))
        paths = (recorded_path(self._workspace, name) for name in names if isinstance(name, str))
        return any(path.is_relative_to(self._limits.folder) for path in paths)

    def _add_cost(self, recorded: RunRequest | None, state: RunState) -> None:
        """Adds what a run has cost; one that was killed may have spent more than it reported."""
        output = None
        if recorded is not None:
            output = output_of(self._workspace, recorded.kind, recorded.request.get("output"))
        self._usd[output][state.run_id] = state.calls_usd
        is_cut_off = state.status.is_final and state.result is None
        if output is not None and (is_cut_off or output in self._recorded_usd):
            self._recorded_usd[output] = journal_usd(output, with_lost=True)

    def run(
        self, title: str, name: str, request: BaseModel, *, limit_s: float | None = None
    ) -> RunReport:
        """Runs the operation `name`, which starts a run, as a stage; returns the final report.

        limit_s: the seconds after which the run is cancelled; None if it has a limit of its own.
        Raises RunError if the run fails or is cancelled, and RunCancelledError if the recipe is.
        """
        self._report(title, "")
        operation = operation_named(name)
        earlier_runs = list(self._runs_of(operation, request))
        report = self._reusable_run(earlier_runs)
        if report is None:
            resumed = self._with_resume(request, earlier_runs)
            report = cast("RunReport", carry_out(self._workspace, operation, resumed))
        if not report.status.is_final:
            report = self._wait_for_end(title, report, limit_s)
        self._record_end(title, find_run(self._workspace, report.run_id))
        if report.status is not RunStatus.SUCCEEDED:
            problem = report.error.problem if report.error else f"the run was {report.status}"
            fix = report.error.fix if report.error else "start it again"
            if any(limit in problem for limit in _LIMIT_OPTIONS):
                fix = "raise the recipe's budget_usd or minutes, of which each stage gets a share"
            raise RunError(f"{title} ({report.run_id}): {problem}", fix)
        return report

    def call(self, title: str, name: str, request: BaseModel, result: type[_Result]) -> _Result:
        """Runs the operation `name` as a stage, in this call or in a run; returns its result."""
        self._report(title, "")
        operation = operation_named(name)
        outcome = self._active_run(operation, request)
        if outcome is None:
            outcome = carry_out(self._workspace, operation, request)
        if isinstance(outcome, RunReport):
            ended = self._wait_for_end(title, outcome)
            if ended.status is not RunStatus.SUCCEEDED or ended.result is None:
                problem = ended.error.problem if ended.error else f"the run was {ended.status}"
                raise RunError(f"{title} ({ended.run_id}): {problem}", "start the recipe again")
            return msgspec.convert(ended.result, result)
        return cast("_Result", outcome)

    def result_of(self, name: str, request: BaseModel) -> dict[str, Any] | None:
        """Returns the result of the newest run that did a stage; None if none has succeeded."""
        newest = next(self._runs_of(operation_named(name), request), None)
        state = None if newest is None else supervise.read_run(newest)
        if state is None or state.status is not RunStatus.SUCCEEDED:
            return None
        return state.result or {}

    def note(self, text: str) -> None:
        """Records a note for the user in the recipe's run."""
        self._reporter.note(text)

    def _active_run(self, operation: Operation, request: BaseModel) -> RunReport | None:
        """Returns the run of an earlier call that is still doing a stage; None if there is none.

        It writes the stage's output, so a second run would be refused.
        """
        for folder in (
            self._runs_of(operation, request) if operation.run_if_large is not None else ()
        ):
            if not supervise.read_run(folder).status.is_final:
                return get_run(self._workspace, GetRun(run_id=folder.run_id))
        return None

    def _runs_of(self, operation: Operation, request: BaseModel) -> Iterator[RunFolder]:
        """Yields the runs of a stage on unchanged files, and those that resumed them, newest first.

        Their limits may differ from the request's.
        """
        kinds = set() if operation.run is None else set(map(str, operation.run.kinds))
        if operation.run_if_large is not None:
            kinds.add(str(operation.run_if_large))
        wanted = _without_limits(request.model_dump(mode="json"))
        runs: list[tuple[str, RunFolder]] = []
        for folder in all_runs(self._workspace):
            if folder.run_id.partition("-")[0] not in kinds:
                continue
            first = [folder, *folder.earlier_runs()][-1]
            recorded = first.try_read_request()
            if recorded is None or _without_limits(recorded.request) != wanted:
                continue
            try:
                first.check_inputs()
                runs.append((folder.read().created_at, folder))
            # Files have changed, or run.json is damaged, so the run cannot be reused.
            except (RunError, DataError, OSError):
                continue
        yield from (folder for _, folder in sorted(runs, key=lambda pair: pair[0], reverse=True))

    def _reusable_run(self, runs: Sequence[RunFolder]) -> RunReport | None:
        """Returns the newest run of a stage if it finished the stage or is still active, else None.

        A run that a limit ended counts as finished, except rollouts whose limits were raised since.
        The limit may have been the workspace's budget.
        """
        if not runs:
            return None
        state = supervise.read_run(runs[0])
        if state.status is RunStatus.SUCCEEDED:
            result = state.result or {}
            limit = result.get("stopped_by") if state.kind is RunKind.ROLLOUTS else None
            # Only rollouts can be resumed without paying for anything again.
            if limit in _LIMIT_OPTIONS and (
                state.created_at < self._limits.since
                or (limit == "budget_usd" and has_budget_risen(self._workspace, runs[0]))
            ):
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
        """Returns whether a run's output still exists, and no later run has replaced it."""
        if not isinstance(output, str):
            return True
        path = self._workspace.path(output)
        manifest = read_manifest(path) if path.exists() else None
        if manifest is None or path.is_dir():
            return manifest is not None and manifest.run_id == run_id
        return matches_record(path, manifest.output)

    def _with_resume(self, request: BaseModel, earlier_runs: Sequence[RunFolder]) -> BaseModel:
        """Returns the request; a training resumes the newest run with a checkpoint."""
        if not isinstance(request, StartTraining):
            return request
        for folder in earlier_runs:
            if resume_hint(folder, RunKind(folder.run_id.partition("-")[0])):
                left_s, limit = self.remaining_s, tuple[str, ...]()
                if left_s is not None:
                    limit = (f"trainer.max_minutes={max(0.1, left_s / 60):.2f}",)
                return StartTraining(resume=folder.run_id, overrides=limit)
        return request

    def _record_end(self, title: str, folder: RunFolder) -> None:
        """Records an ended run in `done`, and its cost."""
        state = folder.read()
        usd, seconds = state.calls_usd, round(state.seconds or 0.0, 1)
        self._add_cost(folder.try_read_request(), state)
        # A later stage may reuse the run of an earlier stage.
        if folder.run_id not in {stage.run_id for stage in self.done}:
            self.done.append(StageRun(stage=title, run_id=folder.run_id, seconds=seconds, usd=usd))
        self._reporter.metrics(len(self.done), {"spent_usd": self.spent_usd})

    def _wait_for_end(
        self, title: str, report: RunReport, limit_s: float | None = None
    ) -> RunReport:
        """Waits for the end of a run while reporting its progress; cancels it after `limit_s`.

        If the recipe is cancelled, the run is cancelled too, and RunCancelledError is raised once
        it has ended or a minute has passed.
        """
        cancelled_at: float | None = None
        started = time.monotonic()
        while not report.status.is_final:
            is_late = limit_s is not None and time.monotonic() - started > limit_s
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
        number, left = self._titles.index(title), self.remaining_s
        # The durations of stages differ too much to extrapolate from.
        eta_s = None if left is None or left <= 0 else round(left, 1)
        self._reporter.progress(
            number, len(self._titles), unit="stages", phase=f"{title}{details}", eta_s=eta_s
        )


def _without_limits(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a request's options without limits, and without those that are not set.

    Requests of earlier versions lack newer options.
    """
    return {
        name: value
        for name, value in document.items()
        if value is not None and name not in _LIMIT_OPTIONS
    }

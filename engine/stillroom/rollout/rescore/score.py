"""Computes the rewards of existing rollouts again; no turn is sampled."""

import itertools
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

from stillroom.data.row_files import rollout_files
from stillroom.errors import CallFailedError, DataError, EngineError, FailureClass, RunError
from stillroom.files import AppendLog, LineWriter, content_hash
from stillroom.lineage import Recording
from stillroom.outputs import new_output
from stillroom.reporting import Reporter, cancel_when_asked, stop_if_cancelled
from stillroom.rollout.context import open_user_pool
from stillroom.rollout.rescore.request import ScoreRollouts, ScoringPlan, plan_scoring
from stillroom.rollout.rescore.rows import (
    InputRow,
    JudgeableRow,
    ScoreJournal,
    ScoreResult,
    ScoreTally,
    has_same_reward,
    input_rows,
    reward_of,
    scores_path,
    with_rewards,
)
from stillroom.rollout.results import AnswererWatch
from stillroom.rollout.rewards.judge_plan import JudgePlan, open_judge
from stillroom.rollout.rewards.matchers import AnswerMatch
from stillroom.rollout.rewards.rewards import Judgement, Rewarder
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget, BudgetSpentError, Cost
from stillroom.tools.user.file import UserFile
from stillroom.types import RowReason

_PHASE = "score rollouts"
_ROWS_PER_WORKER = 4


async def score_rollouts(
    workspace: Workspace,
    request: ScoreRollouts,
    *,
    folder: Path,
    reporter: Reporter,
) -> ScoreResult:
    """Writes the rows with new rewards and returns the counts; `folder` is the run's own folder.

    The output is written whole or not at all. Only a row's reward, rewards and success change, and
    the error of an earlier reward is removed.
    Until the output is complete, a journal keeps the judge's judgements, so that the same command
    does not pay for them again. Raises RunCancelledError between batches of rows if the run is
    cancelled, DataError if no row has a reward function, judge or expected answer, and RunError if
    no reward could be computed.
    """
    plan = plan_scoring(workspace, request)
    source, output, judge = plan.source, plan.output, plan.judge
    async with AsyncExitStack() as stack:
        new_file = stack.enter_context(
            new_output(
                output,
                operation="score_rollouts",
                overwrite=request.overwrite,
                run_id=folder.name,
            )
        )
        recording = stack.enter_context(Recording([*rollout_files(source), *plan.inputs[1:]]))
        journal_file = scores_path(output)
        journal = stack.enter_context(
            ScoreJournal(journal_file, _settings_hash(request, judge, plan.rewards))
        )
        run_folder, spent_usd = RunFolder(folder), journal.spent_usd
        limit_usd = run_folder.limit_usd(request.budget_usd, spent_usd)
        budget = Budget(usd=limit_usd, spent=Cost(usd=spent_usd))
        rewarder = await _open_rewarder(stack, workspace, request, plan, budget, reporter)
        total = _check_rows(source, rewarder)
        run_folder.check_inputs()
        log = stack.enter_context(AppendLog(folder / "judgements.jsonl"))
        run = _Run(rewarder, journal, log, reporter, total, judge.file.model if judge else "")
        try:
            await run.score(source, new_file.rows, request)
        finally:
            # Also after a failure, since the calls before it must be recorded.
            run.report()
            journal.record_unused_cost(run.tally.cost_usd or 0.0)
        run_folder.check_inputs()
        inputs = await anyio.to_thread.run_sync(recording.records)
        models = [] if judge is None else [judge.file.record("judge")]
        tally = run.tally
        failed = tally.failed.total()
        new_file.record(
            inputs=[*inputs, *tally.with_answerers(models)],
            request=request,
            counts={"read": tally.read, "changed": tally.changed, "failed": failed},
        )
    # After failures the journal is kept: a rerun then pays only for the rows that failed.
    if not failed:
        journal_file.unlink(missing_ok=True)
    return tally.result(workspace.shown(output))


async def _open_rewarder(
    stack: AsyncExitStack,
    workspace: Workspace,
    request: ScoreRollouts,
    plan: ScoringPlan,
    budget: Budget,
    reporter: Reporter,
) -> Rewarder:
    """Opens rewards.py and the judge, whose calls count against the budget."""
    pool = await open_user_pool(
        stack,
        tools_file=None,
        rewards_file=plan.rewards,
        tool_timeout_s=request.reward_timeout,
        reward_timeout_s=request.reward_timeout,
    )
    for note in pool.notes if pool is not None else ():
        reporter.note(note)
    judge = await open_judge(
        stack, workspace, plan.judge, timeout_s=request.request_timeout, budget=budget
    )
    return Rewarder(pool, judge=judge, match=AnswerMatch(request.answer_match))


class _Run:
    """Judges the rows of a scoring run in batches, and counts and writes each row."""

    def __init__(
        self,
        rewarder: Rewarder,
        journal: ScoreJournal,
        log: AppendLog,
        reporter: Reporter,
        total: int,
        judge_model: str,
    ) -> None:
        self.tally = ScoreTally()
        self._rewarder, self._journal, self._log = rewarder, journal, log
        self._reporter, self._total = reporter, total
        self._watch = AnswererWatch(judge_model, recorded_in="the manifest")

    async def score(self, source: Path, rows: LineWriter, request: ScoreRollouts) -> None:
        """Writes every row of the source to the output, in the same order."""
        self.report()
        rows_left = input_rows(source)
        while batch := list(itertools.islice(rows_left, _ROWS_PER_WORKER * request.concurrency)):
            judged = await self._judge_all(batch, request)
            stop_if_cancelled(self._reporter)
            for row, judgement in zip(batch, judged, strict=True):
                rows.write_raw(self._output_line(row, judgement))
            self.report()
        tally = self.tally
        if tally.failed and not tally.rewards_after:
            raise RunError(
                f"no reward could be computed; the first error: {tally.problems[0]}",
                "fix rewards.py or the judge's options, then start again",
            )

    async def _judge_all(
        self, batch: Sequence[InputRow], request: ScoreRollouts
    ) -> list[Judgement | CallFailedError | None]:
        """Returns the judgement of each row of a batch, or the error if judging failed.

        An entry is None if the row has no rollout, or if the run was cancelled before it.
        """
        judged: list[Judgement | CallFailedError | None] = [None] * len(batch)
        waiting = iter(enumerate(batch))

        async def work() -> None:
            for index, row in waiting:
                if row.rollout is not None:
                    judged[index] = await self._judge(row, row.rollout, request.seed)

        async with anyio.create_task_group() as group:
            group.start_soon(cancel_when_asked, self._reporter, group.cancel_scope)
            async with anyio.create_task_group() as workers:
                for _ in range(min(request.concurrency, len(batch))):
                    workers.start_soon(work)
            group.cancel_scope.cancel()
        return judged

    async def _judge(
        self, row: InputRow, rollout: JudgeableRow, seed: int | None
    ) -> Judgement | CallFailedError:
        """Returns the judgement of a row, or the error if judging failed."""
        recorded = self._journal.recorded(row.key)
        if recorded is not None:
            self.tally.replayed += recorded.judge.calls if recorded.judge else 0
            return recorded
        try:
            judgement = await self._rewarder.judge(
                rollout.task, rollout.messages, seed=seed, recorder=self.tally
            )
        except CallFailedError as error:
            return error
        except BudgetSpentError as error:
            raise RunError(
                f"budget_usd would be exceeded, after {self.tally.calls} calls of the judge; "
                "nothing was written",
                "repeat the call with a higher budget_usd; finished judgements are reused",
            ) from error
        # An error that every row would have (a rejected API key, a full disk) ends the run.
        except (EngineError, OSError, MemoryError):
            raise
        # Any other error concerns this row alone and must not end the others.
        except Exception as error:
            traceback.print_exc()
            return CallFailedError(FailureClass.INTERNAL, f"{type(error).__name__}: {error}")
        self._journal.record(row.key, judgement)
        return judgement

    def _output_line(self, row: InputRow, judged: Judgement | CallFailedError | None) -> bytes:
        """Counts a row and returns its line for the output."""
        tally, rollout = self.tally, row.rollout
        tally.read += 1
        if rollout is None or judged is None:
            return self._kept_line(row, row.reason)
        if (before := reward_of(rollout)) is not None:
            tally.rewards_before.append(before)
        if isinstance(judged, CallFailedError):
            tally.failed[judged.kind] += 1
            tally.add_problem(row, judged.message)
            self._log_judgement(row, {"class": judged.kind, "message": judged.message})
            return with_rewards(row, rollout, Judgement(None, {}))
        if judged.total is None:
            return self._kept_line(row, RowReason.UNJUDGED)
        tally.rewards_after.append(judged.total)
        if judged.judge is not None:
            tally.judged_by[judged.judge.answered_by] += 1
            for text in self._watch.new_model_notes(judged.judge.answered_by):
                self._reporter.note(text)
        tally.num_success += judged.success is True
        if judged.reasoning is not None:
            self._log_judgement(row, {"rewards": judged.by_name, "reasoning": judged.reasoning})
        if has_same_reward(rollout, judged):
            return self._kept_line(row, RowReason.SAME_REWARD)
        tally.changed += 1
        return with_rewards(row, rollout, judged)

    def _kept_line(self, row: InputRow, reason: str) -> bytes:
        """Counts a row that is kept, and returns its unchanged line."""
        self.tally.kept[reason] += 1
        if reason == RowReason.NOT_A_ROLLOUT:
            self.tally.add_problem(row, reason)
        return row.data

    def _log_judgement(self, row: InputRow, details: Mapping[str, Any]) -> None:
        self._log.append({"where": row.location, **details})

    def report(self) -> None:
        """Reports the counts so far."""
        tally = self.tally
        values: dict[str, float] = {
            "changed": tally.changed,
            "failed": tally.failed.total(),
            "judge_calls": tally.calls,
            "judge_tokens": tally.usage.prompt_tokens + tally.usage.completion_tokens,
        }
        if tally.calls and tally.cost_usd is not None:
            values["cost_usd"] = tally.cost_usd
        self._reporter.metrics(tally.read, values)
        self._reporter.progress(tally.read, self._total, unit="rollouts", phase=_PHASE)


def _check_rows(source: Path, rewarder: Rewarder) -> int:
    """Checks all rows and returns how many there are.

    Raises DataError for an unusable expected answer, or if no row will get a reward.
    """
    total = num_rollouts = num_judged = 0
    for row in input_rows(source):
        total += 1
        if row.rollout is not None:
            num_rollouts += 1
            rewarder.check([row.rollout.task])
            num_judged += rewarder.has_reward(row.rollout.task)
    if not num_rollouts:
        raise DataError(
            f"none of the {total} rows of {source} is a rollout that can be judged",
            "give rollouts from generate_rollouts or import_rollouts that did not fail; "
            "validate_dataset reports malformed rows",
        )
    if not num_judged:
        raise DataError(
            f"no reward function, judge or expected answer for any of the {num_rollouts} rollouts "
            f"of {source}",
            "give rewards=rewards.py or judge=judge.yml; without them a row needs "
            "metadata.expected_answer",
        )
    return total


def _settings_hash(
    request: ScoreRollouts, judge: JudgePlan | None, rewards: UserFile | None
) -> str:
    """Returns a hash of all settings that shape a judgement."""
    shaping = request.model_dump(
        mode="json",
        exclude={
            "input",
            "output",
            "overwrite",
            "concurrency",
            "reward_timeout",
            "request_timeout",
            "budget_usd",
        },
    )
    code = rewards.code.decode("utf-8", errors="replace") if rewards else None
    judge_settings = judge and judge.file.model_dump(mode="json")
    if rewards is not None and rewards.modules:
        shaping["modules"] = rewards.modules_sha256
    return content_hash({**shaping, "judge": judge_settings, "rewards": code})

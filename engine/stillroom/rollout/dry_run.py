"""A dry run, which reads the files and starts the tools like a real run but calls no model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from stillroom.data.formats import Task
from stillroom.data.row_files import read_row_lines
from stillroom.data.task_file import TaskFile
from stillroom.lineage import read_manifest
from stillroom.rollout.context import ToolsAndRewards, open_rewarder, open_tools_and_rewards
from stillroom.rollout.episode.collect import RolloutSpec, RolloutSpecs
from stillroom.rollout.episode.loop import offered_tools
from stillroom.rollout.forecast import (
    CallRules,
    Forecast,
    GraderSize,
    Prices,
    RequestedRollouts,
    RolloutSize,
    forecast,
)
from stillroom.rollout.journal.finished import finished_rows
from stillroom.rollout.journal.journal import check_settings, journal_path
from stillroom.rollout.journal.records import FinishedRow, RecordedSteps, RolloutKey, read_journal
from stillroom.rollout.journal.shards import read_unmerged_shards
from stillroom.rollout.plan import GenerationPlan, RolloutPlan
from stillroom.rollout.refine_plan import FailedRollouts, RecordedRollout
from stillroom.rollout.refining import MAX_TRIES, critic_messages
from stillroom.rollout.request import GenerateRollouts, RolloutOptions
from stillroom.rollout.rewards.judge import RESPONSE_FORMATS, judge_messages
from stillroom.rollout.rewards.judge_plan import JudgePlan
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.teachers.pricing import Price
from stillroom.types import CallTotals, Message

_NONCE = "0" * 16
_MAX_LOGGED_ROWS = 2000
_LOGGED_ROW = msgspec.json.Decoder(FinishedRow)
_SHORTEST_ANSWER = "-"
"""The answer that the low bound assumes. It is not empty, because a judge is shown an empty answer
as "(no answer)", which is longer."""


async def dry_run(
    plan: GenerationPlan,
    tasks: TaskFile,
    specs: RolloutSpecs,
    settings: Mapping[str, object],
    failed: FailedRollouts | None = None,
) -> Forecast:
    """Returns a forecast of a run's calls, tokens and cost; calls no model and writes no file.

    Raises whatever the run would raise before its first call.
    """
    request, output = plan.request, plan.output
    check_settings(output, settings)
    finished = finished_rows(output)
    steps = read_journal(journal_path(output), finished).recorded_steps
    unmerged_rows, unmerged_steps = read_unmerged_shards(output, finished)
    for row in unmerged_rows.values():
        finished.add(row)
    todo, steps = specs.where(lambda key: key not in finished), steps | unmerged_steps
    to_refine = failed if failed is not None and request.replays_student else None

    def adjust_size(spec: RolloutSpec, size: RolloutSize) -> RolloutSize:
        return (
            size
            if to_refine is None
            else _refining_size(size, spec, request, to_refine[spec.key], steps)
        )

    rows, rows_file = list(finished.rows()), request.output
    if not rows:
        rows, rows_file = _logged_rows(plan.rollouts)
    counts = RequestedRollouts(len(specs), rows_file)
    recorded = _RecordedWork(steps, rows)
    return await _forecast(plan.rollouts, plan.price, tasks, todo, counts, recorded, adjust_size)


async def forecast_rollouts(
    plan: RolloutPlan, price: Price | None, specs: Sequence[RolloutSpec], *, output: str
) -> Forecast:
    """Returns a forecast of rollouts that have not started; calls no model and writes no file."""
    tasks = [spec.task for spec in specs]
    rows, rows_file = _logged_rows(plan)
    counts = RequestedRollouts(len(specs), rows_file or output)
    return await _forecast(plan, price, tasks, specs, counts, _RecordedWork(rows=rows))


def _logged_rows(plan: RolloutPlan) -> tuple[list[FinishedRow], str]:
    """Returns the first rows of the imported log that the prompts come from, and its file's name.

    Only rows with turns and token counts are returned, and none if the prompts were not imported.
    """
    manifest = read_manifest(plan.prompts_file)
    output = manifest.request.get("output") if manifest is not None else None
    if manifest is None or manifest.operation != "import_rollouts" or not isinstance(output, str):
        return [], output or ""
    rows: list[FinishedRow] = []
    file = plan.workspace.path(output)
    for line in islice(read_row_lines(file), _MAX_LOGGED_ROWS) if file.is_file() else ():
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            row = _LOGGED_ROW.decode(line.data)
            if row.usage.completion_tokens and row.turns:
                rows.append(row)
    return rows, output


@dataclass(frozen=True, slots=True)
class _RecordedWork:
    """The recorded steps of an output, and the rows that the expected numbers are based on."""

    steps: Mapping[RolloutKey, RecordedSteps] = field(
        default_factory=dict[RolloutKey, RecordedSteps]
    )
    rows: Sequence[FinishedRow] = ()


_NOTHING_RECORDED = _RecordedWork()


async def _forecast(
    rollouts: RolloutPlan,
    price: Price | None,
    tasks: Sequence[Task],
    todo: Iterable[RolloutSpec],
    counts: RequestedRollouts,
    recorded: _RecordedWork = _NOTHING_RECORDED,
    adjust_size: Callable[[RolloutSpec, RolloutSize], RolloutSize] = lambda _spec, size: size,
) -> Forecast:
    """Returns the forecast of the rollouts `todo`; `adjust_size` changes the size of a rollout."""
    options = rollouts.options
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_tools_and_rewards(rollouts, tasks))
        rewarder = await open_rewarder(stack, rollouts, tasks, opened.pool)
        judge_size = _judge_size_function(rollouts.judge, rewarder)
        sizes = [
            adjust_size(spec, _rollout_size(spec, options, opened, recorded.steps, judge_size))
            for spec in todo
        ]
    judge = rollouts.judge
    critic = rollouts.refine.critic if rollouts.refine is not None else None
    result = forecast(
        sizes,
        recorded.rows,
        CallRules(
            max_turns=options.max_turns,
            max_tokens=options.max_tokens,
            has_tools=any(offered_tools(task, opened.tools) for task in tasks),
            max_tool_response=options.max_tool_response,
            nudge=options.nudge_to_send,
            judge_max_tokens=judge.file.max_tokens if judge else 0,
            judge_sees_conversation=judge is not None and judge.file.sees == "conversation",
            critic_max_tokens=critic.file.max_tokens if critic else options.max_tokens,
            critic_tries=MAX_TRIES,
        ),
        Prices(price, judge.price if judge else None, critic.price if critic else price),
        counts,
    )
    return msgspec.structs.replace(result, terms=options.terms)


def _rollout_size(
    spec: RolloutSpec,
    options: RolloutOptions,
    opened: ToolsAndRewards,
    recorded_steps: Mapping[RolloutKey, RecordedSteps],
    judge_size: Callable[[Task, bool], GraderSize | None],
) -> RolloutSize:
    """Returns the size of one rollout that is still to run."""
    task = spec.task
    schemas = offered_tools(task, opened.tools)
    may_continue = bool(schemas) or options.nudge_to_send is not None
    # If tools keep state, recorded turns are not replayed: the state that they led to is gone.
    is_replayed = opened.tools is None or not opened.tools.keeps_state
    steps = recorded_steps.get(spec.key, RecordedSteps())
    return RolloutSize(
        text_bytes=_text_bytes(task.messages),
        request_bytes=len(msgspec.json.encode([task.messages, schemas])),
        max_turns=options.max_turns if may_continue else 1,
        num_recorded=len(steps.turns) if is_replayed else 0,
        judge=judge_size(task, not steps.judge),
    )


def _refining_size(
    size: RolloutSize,
    spec: RolloutSpec,
    request: GenerateRollouts,
    rollout: RecordedRollout,
    recorded_steps: Mapping[RolloutKey, RecordedSteps],
) -> RolloutSize:
    """Returns the size of a rollout in which the teacher takes over from a student.

    The student's turns are sent with each call of the teacher, which is not called if the critic
    finds no turn wrong.
    """
    turns = [[turn, *replies] for turn, replies in rollout.steps]
    turn_bytes = len(msgspec.json.encode(turns))
    has_critic, critic = request.takeover == "critic", None
    steps = recorded_steps.get(spec.key, RecordedSteps())
    if has_critic:
        messages = critic_messages(spec.task, turns)
        critic = GraderSize(
            text_bytes=_text_bytes(messages),
            request_bytes=len(msgspec.json.encode(messages)),
            is_certain=not steps.critic,
        )
    num_calls = sum(CallTotals.of(turn).calls for turn in steps.turns.values())
    return replace(
        size,
        request_bytes=size.request_bytes + turn_bytes,
        max_turns=1 if has_critic and request.turns == "one" else size.max_turns,
        num_recorded=num_calls if size.num_recorded else 0,
        is_certain=not has_critic,
        critic=critic,
    )


def _judge_size_function(
    plan: JudgePlan | None, rewarder: Rewarder
) -> Callable[[Task, bool], GraderSize | None]:
    """Returns a function that gives the size of the judge's prompt, or None without a judge call.

    Its second argument is True if the rollout has no recorded judge call yet.
    """

    def judge_size(task: Task, is_new: bool) -> GraderSize | None:
        if plan is None or not rewarder.asks_judge(task):
            return None
        judge = plan.file
        messages = judge_messages(judge.rubric, task, _SHORTEST_ANSWER, nonce=_NONCE)
        sent = [messages, RESPONSE_FORMATS[judge.reply_format]]
        return GraderSize(
            text_bytes=_text_bytes(messages),
            request_bytes=len(msgspec.json.encode(sent)),
            is_certain=is_new and not rewarder.may_skip_judge(task),
        )

    return judge_size


def _text_bytes(messages: Sequence[Message]) -> int:
    """Returns the size in bytes of the messages' text.

    Images are left out: their tokens do not depend on their bytes.
    """
    contents = (message.get("content") for message in messages)
    return sum(len(content.encode()) for content in contents if isinstance(content, str))

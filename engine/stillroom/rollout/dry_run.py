"""A dry run: the tools are started and the files read as a run does, and no model is called."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from stillroom.data.formats import Task
from stillroom.rollout.context import ToolsAndRewards, open_tools_and_rewards
from stillroom.rollout.episode.collect import RolloutSpec
from stillroom.rollout.episode.loop import offered_tools
from stillroom.rollout.forecast import (
    CallRules,
    Forecast,
    JudgeLoad,
    Prices,
    RequestedRollouts,
    RolloutLoad,
    forecast,
)
from stillroom.rollout.journal.journal import check_settings, journal_path
from stillroom.rollout.journal.records import KnownSteps, RolloutKey, finished_rows, read_journal
from stillroom.rollout.journal.shards import left_by_shards
from stillroom.rollout.request import GenerateRollouts, price_of
from stillroom.rollout.rewards.judge import RESPONSE_FORMATS, judge_messages
from stillroom.rollout.rewards.judge_request import JudgeFile, judge_price, open_judge
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.settings import Workspace
from stillroom.teachers.providers import terms_of
from stillroom.types import Message

_NONCE = "0" * 16
_SHORTEST_ANSWER = "-"
"""An empty one is told in more words."""


async def dry_run(
    workspace: Workspace,
    request: GenerateRollouts,
    specs: Sequence[RolloutSpec],
    judge: JudgeFile | None,
    output: Path,
    settings: Mapping[str, object],
) -> Forecast:
    """Returns what a run would take: no model is called, no file written.

    Raises what the run would raise before its first call.
    """
    check_settings(output, settings)
    finished = finished_rows(output)
    known = read_journal(journal_path(output), finished).known
    rows, steps = left_by_shards(output, finished)
    finished, known = finished | rows, known | steps
    todo = [spec for spec in specs if spec.key not in finished]
    tasks = [spec.task for spec in specs]
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(open_tools_and_rewards(workspace, request, tasks))
        asked = await open_judge(stack, workspace, judge, timeout_s=request.request_timeout)
        rewarder = Rewarder(stage.pool, judge=asked, match=request.default_match)
        rewarder.check(tasks)
        judge_load = _judge_loads(judge, rewarder)
        loads = [_load(spec, request, stage, known, judge_load) for spec in todo]
    has_tools = any(offered_tools(task, stage.tools) for task in tasks)
    told = forecast(
        loads,
        list(finished.values()),
        CallRules(
            max_turns=request.max_turns,
            max_tokens=request.max_tokens,
            has_tools=has_tools,
            max_tool_response=request.max_tool_response,
            nudge=request.nudge_to_send,
            judge_max_tokens=judge.max_tokens if judge else 0,
            judge_sees_conversation=judge is not None and judge.sees == "conversation",
        ),
        Prices(price_of(workspace, request), judge and judge_price(workspace, judge)),
        RequestedRollouts(len(specs), request.output),
    )
    return msgspec.structs.replace(told, terms=terms_of(request.provider, request.base_url))


def _load(
    spec: RolloutSpec,
    request: GenerateRollouts,
    stage: ToolsAndRewards,
    known: Mapping[RolloutKey, KnownSteps],
    judge_load: Callable[[Task, bool], JudgeLoad | None],
) -> RolloutLoad:
    task = spec.task
    schemas = offered_tools(task, stage.tools)
    goes_on = bool(schemas) or request.nudge_to_send is not None
    # Of tools that keep state nothing may be replayed.
    is_replayed = stage.tools is None or not stage.tools.keeps_state
    steps = known.get(spec.key, KnownSteps())
    return RolloutLoad(
        text_bytes=_text_bytes(task.messages),
        request_bytes=len(msgspec.json.encode([task.messages, schemas])),
        max_turns=request.max_turns if goes_on else 1,
        num_known=len(steps.turns) if is_replayed else 0,
        judge=judge_load(task, not steps.judge),
    )


def _judge_loads(
    judge: JudgeFile | None, rewarder: Rewarder
) -> Callable[[Task, bool], JudgeLoad | None]:
    """Returns what tells what a judge is sent for a task, and whether no call is on record yet."""

    def load(task: Task, is_new: bool) -> JudgeLoad | None:
        if judge is None or not rewarder.asks_judge(task):
            return None
        messages = judge_messages(judge.rubric, task, _SHORTEST_ANSWER, nonce=_NONCE)
        sent = [messages, RESPONSE_FORMATS[judge.reply_format]]
        return JudgeLoad(
            text_bytes=_text_bytes(messages),
            request_bytes=len(msgspec.json.encode(sent)),
            is_certain=is_new and not rewarder.may_block(task),
        )

    return load


def _text_bytes(messages: Sequence[Message]) -> int:
    """Returns the bytes of what is written in the messages; pictures have no fixed size."""
    contents = (message.get("content") for message in messages)
    return sum(len(content.encode()) for content in contents if isinstance(content, str))

"""An interactive chat with a model and its tools, to try a student by hand."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from pydantic import Field

from stillroom.data.formats import Task, load_tasks
from stillroom.errors import CallFailedError, InputError
from stillroom.rollout.context import open_rollout_context
from stillroom.rollout.episode.collect import RolloutContext, open_task_tools
from stillroom.rollout.episode.loop import Episode, play_episode
from stillroom.rollout.journal.records import EpisodeRecorder
from stillroom.rollout.plan import plan_rollouts, sampling_settings
from stillroom.rollout.request import RolloutOptions
from stillroom.settings import Workspace
from stillroom.tools.source import ToolResult
from stillroom.types import Message, SampledTurn, StopReason

_CUT_SHORT = {
    StopReason.MAX_TURNS: "reached max_turns while still calling tools",
    StopReason.MAX_TOKENS: "cut at max_tokens",
    StopReason.CONTEXT_WINDOW: "the conversation fills the model's context: start a new one",
    StopReason.CONTENT_FILTER: "the endpoint's content filter withheld the rest",
}


class ChatWithModel(RolloutOptions):
    """Request for a chat with a model."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    data: Annotated[
        str | None, Field(description="Prompts file; the tools get its row's metadata")
    ] = None
    row: Annotated[int, Field(ge=0, description="Row of data, from 0; its messages come first")] = 0


class _TurnPrinter(EpisodeRecorder):
    """Shows each turn and each tool's reply as soon as it arrives."""

    def __init__(self, show: Callable[[Message], None]) -> None:
        self._show = show

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        self._show(turn.message)

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        for reply in replies:
            self._show({"role": "tool", "content": reply.content})


class Conversation:
    """An open conversation. Each message renders the whole history again, as a chat server does."""

    def __init__(
        self, context: RolloutContext, task: Task, show: Callable[[Message], None]
    ) -> None:
        self._context, self._task, self._show = context, task, show
        self._num_answers = 0
        self.messages: list[Message] = list(task.messages)

    def start_over(self) -> None:
        """Resets the conversation to the messages that it began with."""
        self.messages = list(self._task.messages)

    async def send(self, text: str | None) -> str | None:
        """Sends a user's message and plays the model's answer; None continues the messages so far.

        Shows each turn and tool reply as it arrives. Returns why the answer was cut short or
        failed; None if it is complete. A failure leaves the conversation unchanged.
        """
        new_messages: list[Message] = [] if text is None else [{"role": "user", "content": text}]
        episode = Episode(messages=[*self.messages, *new_messages])
        task = msgspec.structs.replace(self._task, messages=episode.messages)
        self._num_answers += 1
        try:
            async with (
                open_task_tools(task, self._context.tools, self._context.cut_reply) as tools,
                self._context.policy.converse(
                    list(episode.messages), tools.schemas, seed_key=f"chat:{self._num_answers}"
                ) as conversation,
            ):
                await play_episode(
                    episode, conversation, _TurnPrinter(self._show), tools, self._context.rules
                )
        except CallFailedError as error:
            return f"the call failed, and the conversation is unchanged: {error.message}"
        if episode.messages[-1].get("tool_calls"):
            # Chat templates require a reply to each tool call.
            del episode.messages[-1]
        self.messages = episode.messages
        return _CUT_SHORT.get(episode.stop_reason)


@asynccontextmanager
async def open_chat(
    workspace: Workspace, request: ChatWithModel, show: Callable[[Message], None]
) -> AsyncGenerator[tuple[Conversation, Sequence[str]]]:
    """Yields a conversation with a model and notes on its tools; loads the model first.

    Raises EngineError if the request is invalid.
    """
    task = _task(workspace, request)
    plan = plan_rollouts(workspace, request, prompts=workspace.root)
    task = plan.instruction.apply_to_task(task)
    sampling = sampling_settings(request, temperature=request.temperature)
    async with open_rollout_context(plan, sampling, [task]) as context:
        yield Conversation(context, task, show), context.notes


def _task(workspace: Workspace, request: ChatWithModel) -> Task:
    """Returns the task of the request's row, or an empty task if the request names no file."""
    if request.data is None:
        return Task(
            task_id="0" * 16,
            messages=[],
            metadata={},
            tool_names=None,
            reward_names=None,
            variables={},
        )
    tasks = load_tasks(workspace.existing(request.data, label="data"))
    if request.row >= len(tasks):
        raise InputError(
            f"row {request.row} is out of range: {request.data} has {len(tasks)} rows",
            f"give a row from 0 to {len(tasks) - 1}",
        )
    # Rewards are for whole rollouts.
    return msgspec.structs.replace(tasks[request.row], reward_names=[])

"""Plays one rollout: the policy's turns and the tools' replies, up to an answer or a limit."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, cast

import anyio
import msgspec

from stillroom.data.formats import Task
from stillroom.errors import CallFailedError
from stillroom.rollout.journal.records import EpisodeRecorder
from stillroom.rollout.request import EpisodeOptions
from stillroom.tools.source import ToolResult, ToolSession, ToolSource, ToolTask, error_result
from stillroom.types import (
    Answerer,
    Author,
    CallTotals,
    Message,
    SampledTurn,
    StopReason,
    TokenTrace,
    ToolCall,
    ToolSchema,
    Usage,
    total_usd,
)

CutText = Callable[[str], str]
"""A function that shortens a tool's reply if it is too long, and adds a note that says so."""


def cut_at_characters(max_characters: int) -> CutText:
    """Returns a function that cuts a reply after this many characters."""

    def cut(text: str) -> str:
        if len(text) <= max_characters:
            return text
        kept = text[:max_characters]
        return f"{kept}\n[cut: {max_characters} of {len(text)} characters are shown]"

    return cut


def cut_at_tokens(tokenizer: Any, max_tokens: int) -> CutText:
    """Returns a function that cuts a reply after this many tokens of a fast tokenizer."""

    def cut(text: str) -> str:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        if len(offsets) <= max_tokens:
            return text
        kept = text[: offsets[max_tokens - 1][1]]
        return f"{kept}\n[cut: {max_tokens} of {len(offsets)} tokens are shown]"

    return cut


class PolicyConversation(Protocol):
    """One rollout's conversation with a policy."""

    async def sample(self) -> SampledTurn:
        """Returns the next assistant turn.

        Raises:
            CallFailedError: this call failed for good; the rollout ends.
        """
        ...

    def add_responses(self, turn: Message, responses: Sequence[Message]) -> None:
        """Appends the tool results, or a user's message, that follow the last turn."""
        ...

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that was sampled earlier, instead of sampling it."""
        ...

    def trace(self) -> TokenTrace | None:
        """Returns the exact tokens of the conversation; None for a policy behind an endpoint."""
        ...


class Policy(Protocol):
    """The model that answers: a student or teacher in this process, or one behind an API."""

    def converse(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, seed_key: str
    ) -> AbstractAsyncContextManager[PolicyConversation]:
        """Opens a conversation that begins with the given messages."""
        ...


@dataclass(slots=True)
class Episode:
    """A rollout in progress; a finished one becomes a `Trajectory`."""

    messages: list[Message]
    stop_reason: StopReason = StopReason.ERROR
    turns: int = 0
    tool_errors: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0
    """The cost in USD of the turns so far; None once the price of a turn is unknown."""
    answered_by: tuple[Answerer, ...] = ()
    authors: list[Author] = field(default_factory=list[Author])
    """Who wrote each turn, if the rollout refines a student's; else empty."""
    unused: CallTotals = field(default_factory=CallTotals)
    """The totals of the teacher's calls whose turns were discarded."""


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The rules that end a rollout."""

    max_turns: int
    nudge: str | None = None
    """The user message sent after a turn without a tool call; None if such a turn ends the
    rollout."""

    @classmethod
    def of(cls, options: EpisodeOptions) -> Self:
        """Returns the rules that a request or config.yml's `rollout` sets."""
        return cls(options.max_turns, options.nudge_to_send)

    def stop_reason(self, turn: SampledTurn, num_turns: int) -> StopReason | None:
        """Returns why the rollout ends with this turn, or None if it continues."""
        if turn.finish_reason == "length":
            return StopReason.MAX_TOKENS
        if turn.finish_reason == "context":
            return StopReason.CONTEXT_WINDOW
        if turn.finish_reason == "filter":
            return StopReason.CONTENT_FILTER
        is_last = num_turns >= self.max_turns
        if turn.message.get("tool_calls"):
            return StopReason.MAX_TURNS if is_last else None
        return StopReason.ANSWERED if is_last or self.nudge is None else None

    def nudge_message(self) -> Message:
        """Returns the user message that follows a turn without a tool call."""
        return {"role": "user", "content": self.nudge}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that one task may use."""

    schemas: list[ToolSchema]
    session: ToolSession | None
    cut: CutText | None = None
    """The function that shortens tool replies; None if they are never shortened."""


async def play_episode(
    episode: Episode,
    conversation: PolicyConversation,
    recorder: EpisodeRecorder,
    tools: OfferedTools,
    rules: TurnRules,
) -> None:
    """Plays one rollout to its end, and keeps `episode` up to date even if a call fails.

    Every tool call gets a reply. The reply to a malformed call or an unknown tool says what was
    wrong, so that the model can correct it. A turn without a tool call ends the rollout, unless the
    rules have a nudge: the nudge is then sent as a user message and the rollout continues.
    """
    while True:
        index = episode.turns
        turn = await _next_turn(conversation, recorder, index)
        episode.turns += 1
        episode.usage += turn.usage
        episode.cost_usd = total_usd((episode.cost_usd, turn.cost_usd))
        if turn.answered_by is not None and turn.answered_by not in episode.answered_by:
            episode.answered_by = (*episode.answered_by, turn.answered_by)
        if turn.origin is not None:
            episode.authors.append(turn.origin.author)
            episode.unused += turn.origin.unused or CallTotals()
        episode.messages.append(turn.message)
        if stop := rules.stop_reason(turn, episode.turns):
            episode.stop_reason = stop
            return
        if calls := turn.message.get("tool_calls"):
            results = await _tool_results(calls, recorder, index, tools)
            episode.tool_errors += sum(result.is_error for result in results)
            responses = [
                _tool_message(call, result) for call, result in zip(calls, results, strict=True)
            ]
        else:
            responses = [rules.nudge_message()]
        episode.messages += responses
        conversation.add_responses(turn.message, responses)


async def _next_turn(
    conversation: PolicyConversation, recorder: EpisodeRecorder, index: int
) -> SampledTurn:
    """Returns the recorded turn, or else samples a new one and records it."""
    recorded = recorder.recorded_turn(index)
    if recorded is not None:
        conversation.restore(recorded)
        return recorded
    turn = await conversation.sample()
    recorder.record_turn(index, turn)
    return turn


async def _tool_results(
    calls: Sequence[ToolCall], recorder: EpisodeRecorder, index: int, tools: OfferedTools
) -> list[ToolResult]:
    """Returns the recorded replies, or else calls the tools and records their replies."""
    recorded = recorder.recorded_replies(index)
    if recorded is not None:
        return recorded
    results = [_shorten_result(r, tools.cut) for r in await _call_tools(calls, tools)]
    recorder.record_replies(index, results)
    return results


def needs_lost_state(recorder: EpisodeRecorder, rules: TurnRules) -> bool:
    """Returns whether resuming needs tool state that was lost with the previous process."""
    turns: list[SampledTurn] = []
    has_replies = False
    while (turn := recorder.recorded_turn(len(turns))) is not None:
        has_replies = has_replies or bool(recorder.recorded_replies(len(turns)))
        turns.append(turn)
    return has_replies and rules.stop_reason(turns[-1], len(turns)) is None


def _shorten_result(result: ToolResult, cut: CutText | None) -> ToolResult:
    if cut is None:
        return result
    return ToolResult(content=cut(result.content), is_error=result.is_error)


def _tool_message(call: ToolCall, result: ToolResult) -> Message:
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "content": result.content,
    }


async def _call_tools(calls: Sequence[ToolCall], tools: OfferedTools) -> list[ToolResult]:
    """Runs the tool calls of one turn concurrently; the results are in the order of the calls."""
    results: list[ToolResult | None] = [None] * len(calls)
    failures: list[CallFailedError] = []

    async def run(index: int) -> None:
        # Collected rather than raised: the task group would wrap it in an ExceptionGroup.
        try:
            results[index] = await _call_tool(calls[index], tools)
        except CallFailedError as error:
            failures.append(error)

    if len(calls) == 1:
        await run(0)
    else:
        async with anyio.create_task_group() as group:
            for index in range(len(calls)):
                group.start_soon(run, index)
    if failures:
        raise failures[0]
    return cast("list[ToolResult]", results)


async def _call_tool(call: ToolCall, tools: OfferedTools) -> ToolResult:
    """Runs one tool call; a call that is not valid gets an error result."""
    name, arguments_text = call["function"]["name"], call["function"]["arguments"]
    allowed = [schema["function"]["name"] for schema in tools.schemas]
    if tools.session is None or name not in allowed:
        tool_list = f"the tools are: {', '.join(allowed)}" if allowed else "there are no tools"
        return error_result(f"unknown tool {name!r}; {tool_list}")
    try:
        # Strict JSON: NaN and half surrogate pairs could not be passed on to tools.
        arguments: Any = msgspec.json.decode(arguments_text or "{}")
    except (ValueError, RecursionError) as error:
        return error_result(f"the arguments of {name} are not valid JSON ({error})")
    if not isinstance(arguments, dict):
        return error_result(f"the arguments of {name} must be a JSON object")
    return await tools.session.call(name, cast("dict[str, Any]", arguments))


def tool_task(task: Task) -> ToolTask:
    """Returns the part of a task that its tools may see."""
    return ToolTask(task.metadata, task.docker, task.docker_env)


def offered_tools(task: Task, tools: ToolSource | None) -> list[ToolSchema]:
    """Returns the schemas of the tools that a task may use, in the order of the sources.

    A schema in the task's row replaces the source's schema with the same name.
    """
    if tools is None:
        return []
    row_schemas = {s["function"]["name"]: s for s in task.tool_schemas or ()}
    return [
        row_schemas.get(schema["function"]["name"], schema)
        for schema in tools.schemas_for(tool_task(task))
        if task.tool_names is None or schema["function"]["name"] in task.tool_names
    ]

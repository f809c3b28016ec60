"""Reads rollouts in the layouts of rnow and NeMo Gym."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stillroom.data.layouts.detect import RULES, RolloutLayout, layout_of
from stillroom.data.layouts.foreign import as_object, count
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    row_reader,
)
from stillroom.importing.payloads.fields import as_list, first_text, positive_number
from stillroom.importing.payloads.messages import ChatReader, tool_schemas
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat
from stillroom.types import StopReason, Usage

_ENDINGS = {StopReason.ANSWERED: "stop", StopReason.MAX_TOKENS: "length"}


def _reader_of(layout: RolloutLayout) -> Callable[[Sequence[Path]], Iterator[SourceRow]]:
    rules = RULES[layout]

    def conversation(row: JsonRow) -> Iterator[SourceRow]:
        if layout_of(row.data) is not layout:
            raise UnreadableRowError(f"is no rollout of {layout}", "it lacks the layout's fields")
        problem = next(rules.problems(row.data), None)
        if problem is not None:
            detail = f"{problem.field} {problem.message}; {problem.fix}"
            raise UnreadableRowError("the rollout cannot be read", detail)
        yield _conversation(row, rules.read(row.data))

    return row_reader(conversation)


def _conversation(row: JsonRow, rollout: Row) -> LoggedConversation:
    """Returns a rollout, which is in our layout, as it is imported."""
    reader, usage = ChatReader(), as_object(rollout.get("usage"))
    reward, rewards = rollout.get("reward"), as_object(rollout.get("rewards"))
    teacher = as_object(rollout.get("teacher"))
    failure = as_object(rollout.get("error")).get("message")
    tokens = Usage(
        prompt_tokens=count(usage.get("prompt_tokens")),
        completion_tokens=count(usage.get("completion_tokens")),
    )
    return LoggedConversation(
        place=row.place,
        messages=reader.messages(rollout["messages"]),
        is_call=False,
        tools=tool_schemas(as_list(rollout.get("tools"))),
        id=first_text(rollout, "id"),
        model=first_text(teacher, "model"),
        usage=None if tokens == Usage() else tokens,
        duration_s=positive_number(row.data.get("latency")),
        finish_reason=_ENDINGS.get(rollout["stop_reason"]),
        error=failure if isinstance(failure, str) else None,
        scores=({} if reward is None else {"reward": reward}) | rewards,
        losses=tuple(reader.losses),
        metadata=as_object(rollout.get("metadata")),
    )


def _recogniser_of(layout: RolloutLayout) -> Callable[[Path, bytes], bool]:
    return lambda _path, head: any(layout_of(row) is layout for row in head_rows(head))


RNOW = TraceFormat(
    name="rnow",
    title="rnow rollouts",
    is_recognised=_recogniser_of(RolloutLayout.RNOW),
    read=_reader_of(RolloutLayout.RNOW),
)
NEMO_GYM = TraceFormat(
    name="nemo_gym",
    title="NeMo Gym rollouts",
    is_recognised=_recogniser_of(RolloutLayout.NEMO_GYM),
    read=_reader_of(RolloutLayout.NEMO_GYM),
)

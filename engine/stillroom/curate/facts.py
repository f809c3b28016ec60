"""The few fields of a rollout that decide what becomes of it, decoded straight from its line."""

import struct
from typing import Any, Literal

import msgspec

from stillroom.data.foreign import stop_reason
from stillroom.data.layouts import RolloutLayout
from stillroom.data.rnow import failure_of, is_rnow_reward
from stillroom.rollout.rewards import SUCCESS_THRESHOLD

NULL = msgspec.Raw(b"null")
_first_byte = struct.Struct("c").unpack_from
_QUOTE = (b'"',)


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    """What a tool call calls."""

    name: str
    arguments: str


class CallFacts(msgspec.Struct, frozen=True, gc=False):
    """A tool call."""

    function: CalledFunction
    id: str | None = None


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a message; `text` is there where it is a text."""

    type: str
    text: Any = None


Content = str | list[ContentPart] | None
_CONTENT: msgspec.json.Decoder[Content] = msgspec.json.Decoder(Content)


class MessageFacts(msgspec.Struct, frozen=True, gc=False):
    """A message as chat completions know it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: msgspec.Raw = NULL
    """Undecoded: texts are long, and only the last one decides."""
    tool_calls: list[CallFacts] | None = None
    tool_call_id: str | None = None

    def said(self) -> Content:
        """Returns the content. Raises msgspec.ValidationError of what is none."""
        return _CONTENT.decode(self.content)


class RolloutFacts(msgspec.Struct, frozen=True, gc=False):
    """A rollout row of any layout, as far as it decides."""

    messages: list[MessageFacts]
    stop_reason: str
    id: str | None = None
    task_id: str | None = None
    """The row's own, else a hash of the prompt."""
    reward: float | None = None
    success: bool | None = None
    tool_errors: int | None = None
    metadata: dict[str, Any] | None = None
    error: Any = None

    @property
    def num_turns(self) -> int:
        """Assistant turns."""
        count = 0
        for message in self.messages:
            if message.role == "assistant":
                count += 1
        return count

    @property
    def has_final_answer(self) -> bool:
        """Whether it ends with an assistant's text and not with a tool call."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or last.tool_calls:
            return False
        said = last.said()
        return bool(said.strip() if isinstance(said, str) else said)

    @property
    def tools_used(self) -> set[str]:
        """Names of the tools that were called."""
        return {
            call.function.name for message in self.messages for call in message.tool_calls or ()
        }

    @property
    def is_success(self) -> bool:
        """The row's own word; without one the reward decides, then whether the answer is complete.

        What infrastructure ended is no success.
        """
        if self.success is not None:
            return self.success
        if self.error is not None:
            return False
        if self.reward is not None:
            return self.reward >= SUCCESS_THRESHOLD
        return self.has_final_answer and self.stop_reason == "answered"

    @property
    def is_success_derived(self) -> bool:
        """Whether the row itself does not say if it succeeded."""
        return self.success is None


class TaskPrompt(msgspec.Struct, frozen=True):
    """The messages of a row one by one, undecoded."""

    messages: list[msgspec.Raw] = []
    conversation: list[msgspec.Raw] = []


class CommonFields(msgspec.Struct, frozen=True, gc=False):
    """The short fields that decide, of our rollouts and of rnow's."""

    stop_reason: str | None = None
    id: Any = None
    task_id: Any = None
    rewards: dict[str, Any] | None = None
    success: bool | None = None
    completed: Any = None
    truncated: Any = None
    tool_errors: int | None = None
    error: Any = None
    errors: Any = None
    tools: msgspec.Raw = NULL
    stillroom: msgspec.Raw = NULL


class DecodedFields(CommonFields, frozen=True, gc=False):
    """All that decides, decoded in one pass over the line."""

    messages: list[MessageFacts] | None = None
    conversation: list[MessageFacts] | None = None
    reward: float | None = None
    total_reward: float | None = None
    metadata: dict[str, Any] | None = None


class RawFields(CommonFields, frozen=True, gc=False):
    """The same, with the bytes of what goes into training rows."""

    messages: msgspec.Raw = NULL
    conversation: msgspec.Raw = NULL
    reward: msgspec.Raw = NULL
    total_reward: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL


class RolloutParts(msgspec.Struct, frozen=True, gc=False):
    """What of a rollout goes into a training row, as the very bytes it is written with."""

    messages: msgspec.Raw
    tools: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    reward: msgspec.Raw = NULL


def is_sound(messages: list[MessageFacts]) -> bool:
    """Whether every message has its content, and every tool's reply its call.

    With what the types say already, this is all that `message_problems` asks for.
    Raises msgspec.ValidationError of a content that is none.
    """
    called: set[str | None] = {None}
    for message in messages:
        role = message.role
        # What begins as a text is one: the decoder has gone over it.
        is_text = _first_byte(message.content) == _QUOTE
        if not is_text and message.said() is None and role != "assistant":
            return False
        if role == "assistant":
            if message.tool_calls:
                for call in message.tool_calls:
                    called.add(call.id)
        elif role == "tool" and message.tool_call_id not in called:
            return False
    return True


def layout_of_fields(row: CommonFields) -> RolloutLayout | None:
    """Returns whose rollout it is, if these fields are all that matters of it; else None."""
    if row.stop_reason is not None:
        is_plain = isinstance(row.id, str | None) and isinstance(row.task_id, str | None)
        return RolloutLayout.STILLROOM if is_plain else None
    says_how_it_went = row.completed is not None or row.success is not None
    # What was written from a row of ours is that row again.
    return RolloutLayout.RNOW if says_how_it_went and row.stillroom is NULL else None


class LongFields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a row of one layout whose names differ, decoded."""

    messages: list[MessageFacts]
    reward: float | None
    metadata: dict[str, Any] | None


def own_facts(row: CommonFields, long: LongFields) -> RolloutFacts:
    """Returns the facts of a rollout of ours."""
    return RolloutFacts(
        messages=long.messages,
        stop_reason=row.stop_reason or "",
        id=row.id,
        task_id=row.task_id or None,
        reward=long.reward,
        success=row.success,
        tool_errors=row.tool_errors,
        metadata=long.metadata,
        error=row.error,
    )


def rnow_facts(row: CommonFields, long: LongFields) -> RolloutFacts | None:
    """Returns the facts of a rollout of rnow's, as those of what `rollout_from_rnow` makes of it.

    None if it has no messages, or rewards that are neither numbers nor words for their absence.
    """
    messages, failure = long.messages, None
    if not messages:
        return None
    rewards = row.rewards or {}
    is_plain = all(isinstance(value, float) for value in rewards.values())
    if not is_plain or row.completed is not True or row.error:
        if not all(value is None or is_rnow_reward(value) for value in rewards.values()):
            return None
        told = {"rewards": rewards, "error": row.error, "errors": row.errors}
        failure = failure_of({**told, "completed": row.completed})
    last = messages[-1]
    is_open = last.role != "assistant" or bool(last.tool_calls)
    return RolloutFacts(
        messages=messages,
        stop_reason=stop_reason(
            is_failed=failure is not None, is_truncated=row.truncated is True, is_open=is_open
        ),
        id=row.id if isinstance(row.id, str) else "",
        task_id=row.task_id if isinstance(row.task_id, str) and row.task_id else None,
        reward=None if failure else long.reward,
        success=None if failure else row.success,
        metadata=long.metadata or {},
        error=failure,
    )

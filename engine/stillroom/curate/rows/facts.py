"""What decides whether a row is kept: a few fields of its line, and the facts they come to.

The structs say which fields are decoded and as what type; all other bytes of a line are only
skipped. `CommonFields` and its two subclasses fit rollouts of ours, rollouts of rnow and supervised
rows alike, so that a usual line is decoded once, whatever it is.
"""

from typing import Any

import msgspec

from stillroom.data.checks import ROLES
from stillroom.data.layouts.detect import RolloutLayout
from stillroom.data.layouts.foreign import stop_reason
from stillroom.data.layouts.rnow import failure_of, is_rnow_reward
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD

NULL = msgspec.Raw(b"null")
SUPERVISED = "supervised row"
"""The `stop_reason` in the facts of a supervised row."""
# Of the bytes that can begin a JSON value, only a string's quote sorts before this one.
_AFTER_QUOTE = bytearray(b"#")
# As a tuple: `str | None` would be put together anew for each row.
_TEXT_OR_NONE = (str, type(None))


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    """The function that a tool call names, with its arguments as JSON text."""

    name: str
    arguments: str


class CallFacts(msgspec.Struct, frozen=True, gc=False):
    """A tool call of an assistant message."""

    function: CalledFunction
    id: str | None = None


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a message's content; `text` is set where the part is a text."""

    type: str
    text: Any = None


Content = str | list[ContentPart] | None
_CONTENT: msgspec.json.Decoder[Content] = msgspec.json.Decoder(Content)


class MessageFacts(msgspec.Struct, frozen=True, gc=False):
    """A chat message, its content undecoded."""

    role: str
    """Any text; `count_turns` refuses what is no role."""
    content: msgspec.Raw = NULL
    """The JSON of the content: texts are long, and filters on facts read the last one only."""
    tool_calls: list[CallFacts] | None = None
    tool_call_id: str | None = None

    def decode_content(self) -> Content:
        """Returns the content. Raises msgspec.ValidationError if it has another type."""
        return _CONTENT.decode(self.content)


class CommonFields(msgspec.Struct, frozen=True, gc=False):
    """The short fields that decide, of our rollouts, of rnow's and of supervised rows."""

    stop_reason: str | msgspec.UnsetType | None = msgspec.UNSET
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
    rollout_id: str | None = None
    output: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    responses_create_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class DecodedFields(CommonFields, frozen=True, gc=False):
    """All fields that decide."""

    reward: float | None = None
    total_reward: float | None = None
    metadata: dict[str, Any] | None = None
    messages: list[MessageFacts] | None = None
    conversation: list[MessageFacts] | None = None


class RawFields(CommonFields, frozen=True, gc=False):
    """All fields that decide; those that go into training rows as their very bytes."""

    reward: msgspec.Raw = NULL
    total_reward: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    conversation: msgspec.Raw = NULL


class CheckedFields(msgspec.Struct, frozen=True, gc=False):
    """The fields that decide, of a rollout in our layout whose problems were looked for already."""

    messages: list[MessageFacts]
    stop_reason: str
    id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    success: bool | None = None
    tool_errors: int | None = None
    metadata: dict[str, Any] | None = None
    error: Any = None


class SupervisedFields(msgspec.Struct, frozen=True):
    """The fields that decide, of a supervised row; it may hold anything in fields of rollouts."""

    messages: list[MessageFacts]
    id: str | None = None
    rollout_id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    success: bool | None = None
    metadata: dict[str, Any] | None = None
    stop_reason: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class RolloutParts(msgspec.Struct, frozen=True, gc=False):
    """The parts of a rollout that go into a training row, as the very bytes of its line."""

    messages: msgspec.Raw
    tools: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    reward: msgspec.Raw = NULL


class RowFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts of a rollout of any layout, or of a supervised row, that decide about it."""

    messages: list[MessageFacts]
    num_turns: int
    """Messages of the assistant."""
    stop_reason: str
    id: str | None = None
    task_id: str | None = None
    """The row's own; of a rollout without one, a hash of its prompt."""
    reward: float | None = None
    success: bool | None = None
    tool_errors: int | None = None
    metadata: dict[str, Any] | None = None
    error: Any = None

    @property
    def has_final_answer(self) -> bool:
        """Whether the conversation ends with an assistant's text and not with a tool call."""
        if _is_open(self.messages):
            return False
        content = self.messages[-1].decode_content()
        return bool(content.strip() if isinstance(content, str) else content)

    @property
    def tools_used(self) -> set[str]:
        """The names of the tools that were called."""
        return {
            call.function.name for message in self.messages for call in message.tool_calls or ()
        }

    @property
    def is_success(self) -> bool:
        """Whether the row is a success: it says so, or has the reward or a complete answer of one.

        A rollout that infrastructure ended is no success.
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


def count_turns(messages: list[MessageFacts]) -> int | None:
    """Returns the number of assistant messages; None if something is wrong with the messages.

    Every message has a known role and content, and every tool's reply its call. With what the types
    check already, this is all that `message_problems` looks for.
    Raises msgspec.ValidationError for content of a wrong type.
    """
    num_turns = 0
    called: set[str | None] = {None}
    for message in messages:
        role = message.role
        # What begins as a JSON string is one: the decoder has gone over it. Decoding each content
        # would take longer than all the rest.
        is_text = message.content < _AFTER_QUOTE
        if not is_text and message.decode_content() is None and role != "assistant":
            return None
        if role == "assistant":
            num_turns += 1
            if message.tool_calls:
                for call in message.tool_calls:
                    called.add(call.id)
        elif role == "tool":
            if message.tool_call_id not in called:
                return None
        elif role not in ROLES:
            return None
    return num_turns


def _is_open(messages: list[MessageFacts]) -> bool:
    """Whether a conversation does not end with the assistant's text: empty, or tools are called."""
    return not messages or messages[-1].role != "assistant" or bool(messages[-1].tool_calls)


def layout_of_fields(row: CommonFields) -> RolloutLayout | None:
    """Returns the layout of a rollout, if these fields are enough to tell it; else None."""
    if isinstance(row.stop_reason, str):
        has_text_ids = isinstance(row.id, _TEXT_OR_NONE) and isinstance(row.task_id, _TEXT_OR_NONE)
        return RolloutLayout.STILLROOM if has_text_ids else None
    if row.stop_reason is None:
        return None
    has_outcome = row.completed is not None or row.success is not None
    # A row of rnow's that was written from one of ours (`stillroom`) is read as ours again.
    return RolloutLayout.RNOW if has_outcome and row.stillroom is NULL else None


def stillroom_facts(
    row: CommonFields | CheckedFields,
    messages: list[MessageFacts],
    num_turns: int,
    reward: float | None,
    metadata: dict[str, Any] | None,
) -> RowFacts:
    """Returns the facts of a rollout in our layout."""
    return RowFacts(
        messages,
        num_turns,
        row.stop_reason or "",
        row.id,
        row.task_id or None,
        reward,
        row.success,
        row.tool_errors,
        metadata,
        row.error,
    )


def checked_facts(row: CheckedFields) -> RowFacts:
    """Returns the facts of a rollout in our layout whose problems were looked for already."""
    num_turns = [message.role for message in row.messages].count("assistant")
    return stillroom_facts(row, row.messages, num_turns, row.reward, row.metadata)


def rnow_facts(
    row: CommonFields,
    messages: list[MessageFacts],
    num_turns: int,
    reward: float | None,
    metadata: dict[str, Any] | None,
) -> RowFacts | None:
    """Returns the facts of rnow's rollout: those of the row that `rollout_from_rnow` makes of it.

    None if it has no messages, or rewards that are neither numbers nor words for their absence.
    """
    if not messages:
        return None
    failure, rewards = None, row.rewards or {}
    are_numbers = _are_numbers(rewards)
    if not are_numbers and not all(map(_is_reward_or_absent, rewards.values())):
        return None
    if row.completed is not True or row.error or not are_numbers:
        outcome = {"rewards": rewards, "error": row.error, "errors": row.errors}
        failure = failure_of({**outcome, "completed": row.completed})
    return RowFacts(
        messages,
        num_turns,
        _STOP_REASONS[failure is not None, row.truncated is True, _is_open(messages)],
        row.id if isinstance(row.id, str) else "",
        row.task_id if isinstance(row.task_id, str) and row.task_id else None,
        None if failure else reward,
        None if failure else row.success,
        None,
        metadata or {},
        failure,
    )


_STOP_REASONS = {
    (is_failed, is_truncated, is_open): stop_reason(
        is_failed=is_failed, is_truncated=is_truncated, is_open=is_open
    )
    for is_failed in (False, True)
    for is_truncated in (False, True)
    for is_open in (False, True)
}


def _are_numbers(rewards: dict[str, Any]) -> bool:
    # A generator for `all` would cost as much as the rest of the facts.
    for value in rewards.values():  # noqa: SIM110
        if type(value) is not float:
            return False
    return True


def _is_reward_or_absent(value: Any) -> bool:
    return value is None or is_rnow_reward(value)


def is_plain_supervised(row: DecodedFields) -> bool:
    """Whether the fields of a supervised row are right and no rollout of any layout has them all.

    Of any other row nothing is said: it takes a closer look.
    """
    return (
        row.stop_reason is msgspec.UNSET
        and row.conversation is None
        and row.output is msgspec.UNSET
        and row.responses_create_params is msgspec.UNSET
        and isinstance(row.id, _TEXT_OR_NONE)
        and isinstance(row.task_id, _TEXT_OR_NONE)
    )


def supervised_facts(row: DecodedFields | SupervisedFields) -> RowFacts | None:
    """Returns the facts of a supervised row; None if it is none.

    Raises msgspec.ValidationError for content of a wrong type.
    """
    messages = row.messages
    # With a stop_reason it is a rollout, and one that could not be read.
    if not messages or messages[-1].role != "assistant" or row.stop_reason is not msgspec.UNSET:
        return None
    num_turns = count_turns(messages)
    if num_turns is None:
        return None
    return RowFacts(
        messages,
        num_turns,
        SUPERVISED,
        id=row.id or row.rollout_id,
        task_id=row.task_id,
        reward=row.reward,
        success=row.success,
        metadata=row.metadata,
    )

"""Reduces a row to the facts that decide whether it is kept, from a few fields of its line.

The structs list the fields to decode, with their types; the decoder skips all other bytes of a
line. `CommonFields` and its two subclasses fit rollouts of ours, rollouts of rnow and supervised
rows alike, so that a usual line is decoded only once, whichever of them it is.
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
# The quote of a string is the only beginning of a JSON value that sorts before this byte.
_AFTER_QUOTE = bytearray(b"#")
# A tuple, because the expression `str | None` would build a new union for each row.
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
    """One part of a message's content; `text` is set if the part is text."""

    type: str
    text: Any = None


Content = str | list[ContentPart] | None
_CONTENT: msgspec.json.Decoder[Content] = msgspec.json.Decoder(Content)


class MessageFacts(msgspec.Struct, frozen=True, gc=False):
    """A chat message whose content is not decoded yet."""

    role: str
    """The role, which may be any string here; `count_turns` rejects unknown roles."""
    content: msgspec.Raw = NULL
    """The JSON of the content, undecoded as it is long and filters on facts read only the last."""
    tool_calls: list[CallFacts] | None = None
    tool_call_id: str | None = None

    def decode_content(self) -> Content:
        """Returns the decoded content. Raises msgspec.ValidationError if it has a wrong type."""
        return _CONTENT.decode(self.content)


class CommonFields(msgspec.Struct, frozen=True, gc=False):
    """The short fields that curation needs, of our rollouts, rnow's and supervised rows."""

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
    """All fields that curation needs, decoded except for the contents of messages."""

    reward: float | None = None
    total_reward: float | None = None
    metadata: dict[str, Any] | None = None
    messages: list[MessageFacts] | None = None
    conversation: list[MessageFacts] | None = None


class RawFields(CommonFields, frozen=True, gc=False):
    """All fields that curation needs; those that go into training rows stay undecoded bytes."""

    reward: msgspec.Raw = NULL
    total_reward: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    conversation: msgspec.Raw = NULL


class CheckedFields(msgspec.Struct, frozen=True, gc=False):
    """The fields that curation needs of a rollout in our layout that has passed all checks."""

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
    """The fields that curation needs of a supervised row, whatever it has in other fields."""

    messages: list[MessageFacts]
    id: str | None = None
    rollout_id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    success: bool | None = None
    metadata: dict[str, Any] | None = None
    stop_reason: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class RolloutParts(msgspec.Struct, frozen=True, gc=False):
    """The fields of a rollout that go into a training row, as undecoded bytes of its line."""

    messages: msgspec.Raw
    tools: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    reward: msgspec.Raw = NULL


class RowFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts by which curation judges a rollout of any layout, or a supervised row."""

    messages: list[MessageFacts]
    num_turns: int
    """The number of messages of the assistant."""
    stop_reason: str
    id: str | None = None
    task_id: str | None = None
    """The row's own task id; for a rollout without one, a hash of its prompt."""
    reward: float | None = None
    success: bool | None = None
    tool_errors: int | None = None
    metadata: dict[str, Any] | None = None
    error: Any = None

    @property
    def has_final_answer(self) -> bool:
        """Whether the last message is the assistant's, is not empty, and calls no tool."""
        if _is_open(self.messages):
            return False
        content = self.messages[-1].decode_content()
        return bool(content.strip() if isinstance(content, str) else content)

    @property
    def tools_used(self) -> set[str]:
        """The names of the tools that the assistant called."""
        return {
            call.function.name for message in self.messages for call in message.tool_calls or ()
        }

    @property
    def is_success(self) -> bool:
        """Whether the row counts as a success.

        Its own `success` decides if it has one. Otherwise a rollout that an infrastructure failure
        ended is no success, then a reward decides (at least 0.5), and then a complete final answer.
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
        """Whether the row has no `success`, so that `is_success` follows from other fields."""
        return self.success is None


def count_turns(messages: list[MessageFacts]) -> int | None:
    """Returns the number of assistant messages; None if something is wrong with the messages.

    Every message must have a known role and content, and every tool reply the id of an earlier
    call. Together with the types of the structs, this checks all that `message_problems` checks.
    Raises msgspec.ValidationError if the content of a message has a wrong type.
    """
    num_turns = 0
    called: set[str | None] = {None}
    for message in messages:
        role = message.role
        # Content that begins with a quote is a valid string, since the decoder has skipped over it.
        # Decoding each content would take longer than all the rest.
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
    """Returns whether a conversation is empty, or does not end with the assistant's answer.

    A last message of the assistant that calls tools is no answer.
    """
    return not messages or messages[-1].role != "assistant" or bool(messages[-1].tool_calls)


def layout_of_fields(row: CommonFields) -> RolloutLayout | None:
    """Returns the layout of a rollout; None if these fields are not enough to determine it."""
    if isinstance(row.stop_reason, str):
        has_text_ids = isinstance(row.id, _TEXT_OR_NONE) and isinstance(row.task_id, _TEXT_OR_NONE)
        return RolloutLayout.STILLROOM if has_text_ids else None
    if row.stop_reason is None:
        return None
    has_outcome = row.completed is not None or row.success is not None
    # A row in rnow's layout that was converted from ours (it has `stillroom`) is restored to ours,
    # which needs all of its fields.
    return RolloutLayout.RNOW if has_outcome and row.stillroom is NULL else None


def stillroom_facts(
    row: CommonFields | CheckedFields,
    messages: list[MessageFacts],
    num_turns: int,
    reward: float | None,
    metadata: dict[str, Any] | None,
) -> RowFacts:
    """Returns the facts of a rollout in our layout, from its fields and decoded parts."""
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
    """Returns the facts of a rollout in our layout that has passed all checks."""
    num_turns = [message.role for message in row.messages].count("assistant")
    return stillroom_facts(row, row.messages, num_turns, row.reward, row.metadata)


def rnow_facts(
    row: CommonFields,
    messages: list[MessageFacts],
    num_turns: int,
    reward: float | None,
    metadata: dict[str, Any] | None,
) -> RowFacts | None:
    """Returns the facts of a rollout in rnow's layout, as `rollout_from_rnow` would translate it.

    None if it has no messages, or a reward that is neither a number nor a sign that there is none.
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
    """Returns whether a row can only be a supervised row, and its fields have the right types.

    If not, it may still be a supervised row: all of its fields must be looked at.
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
    """Returns the facts of a supervised row; None if the row is not one.

    Raises msgspec.ValidationError if the content of a message has a wrong type.
    """
    messages = row.messages
    # A row with a stop_reason is a rollout, and it gets here only if it has problems.
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

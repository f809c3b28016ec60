"""Extracts the facts of a row: the few fields that filters read.

`RowFields` declares the fields to decode; the decoder skips all other bytes of a line. Rollouts in
Stillroom's layout and supervised rows share the struct, so that a usual line is decoded only once.
"""

from typing import Any

import msgspec

from stillroom.data.chat.tool_calls import has_call_text
from stillroom.data.checks import ROLES
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD
from stillroom.types import RowReason

NULL = msgspec.Raw(b"null")
NO_TOOLS = (NULL, msgspec.Raw(b"[]"))
SUPERVISED = "supervised row"
"""The `stop_reason` in the facts of a supervised row."""
# JSON that sorts before this byte is a string: no other JSON value begins with a lower byte.
_BYTE_AFTER_QUOTE = bytearray(b"#")
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


class _Origin(msgspec.Struct, frozen=True, gc=False):
    source: str


_ORIGIN = msgspec.json.Decoder(_Origin)


class MessageFacts(msgspec.Struct, frozen=True, gc=False):
    """A chat message whose content is not decoded yet."""

    role: str
    """The role, which may be any string here; `count_turns` rejects unknown roles."""
    content: msgspec.Raw = NULL
    """The JSON of the content. It is decoded on demand, since most filters read only the last."""
    tool_calls: list[CallFacts] | None = None
    tool_call_id: str | None = None

    def decode_content(self) -> Content:
        """Returns the decoded content. Raises msgspec.ValidationError if it has a wrong type."""
        return _CONTENT.decode(self.content)


class RowFields(msgspec.Struct, frozen=True, gc=False):
    """The fields that curation reads of a rollout in Stillroom's layout, or of a supervised row."""

    messages: list[MessageFacts]
    stop_reason: Any = msgspec.UNSET
    id: Any = None
    rollout_id: Any = None
    task_id: Any = None
    reward: float | None = None
    success: bool | None = None
    tool_errors: Any = None
    metadata: dict[str, Any] | None = None
    error: Any = None
    tools: msgspec.Raw = NULL
    origin: msgspec.Raw = NULL
    conversation: msgspec.Raw = NULL
    output: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    responses_create_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def has_text_ids(self) -> bool:
        """Whether each of the row's own ids is a string or absent."""
        return isinstance(self.id, _TEXT_OR_NONE) and isinstance(self.task_id, _TEXT_OR_NONE)


class RawFields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a rollout that go into a training row, as undecoded bytes of its line."""

    messages: msgspec.Raw
    tools: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    reward: msgspec.Raw = NULL


class RowFacts(msgspec.Struct, frozen=True, gc=False):
    """The fields by which curation judges a rollout in any layout, or a supervised row."""

    messages: list[MessageFacts]
    num_turns: int
    """The number of assistant messages."""
    stop_reason: str
    id: str | None = None
    task_id: str | None = None
    """The row's own task id; for a rollout without one, a hash of its prompt."""
    reward: float | None = None
    success: bool | None = None
    tool_errors: int | None = None
    metadata: dict[str, Any] | None = None
    error: Any = None
    origin: msgspec.Raw = NULL
    """The undecoded JSON of the `origin` that import_rollouts writes into a row."""

    @property
    def original_file(self) -> str | None:
        """The file that import_rollouts took the row from; None for rows that it did not write."""
        if self.origin == NULL:
            return None
        try:
            return _ORIGIN.decode(self.origin).source.rpartition(":")[0] or None
        except msgspec.ValidationError:
            return None

    @property
    def has_final_answer(self) -> bool:
        """Whether the last message is a non-empty assistant message without a tool call.

        Text with a tool call that the model's server did not parse is not an answer either.
        """
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or last.tool_calls:
            return False
        content = last.decode_content()
        if isinstance(content, str):
            return bool(content.strip()) and not has_call_text(content)
        return bool(content)

    @property
    def num_characters(self) -> int:
        """The number of characters in the texts and tool calls of all messages."""
        total = 0
        for message in self.messages:
            content = message.decode_content()
            if isinstance(content, str):
                total += len(content)
            else:
                total += sum(len(part.text) for part in content or () if isinstance(part.text, str))
            for call in message.tool_calls or ():
                total += len(call.function.name) + len(call.function.arguments)
        return total

    @property
    def tools_used(self) -> set[str]:
        """The names of the tools that the assistant called."""
        return {
            call.function.name for message in self.messages for call in message.tool_calls or ()
        }

    @property
    def is_success(self) -> bool:
        """Whether the row counts as a success; see `failure`."""
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """Why the row does not count as a success, in words; None if it does.

        The first of these decides: the row's own `success`; an infrastructure failure, which is
        not a success; the reward, which must be at least 0.5; whether the answer is complete.
        """
        if self.success:
            return None
        if self.error is not None:
            return RowReason.FAILED.value
        if self.success is False or (self.reward is not None and self.reward < SUCCESS_THRESHOLD):
            return "no success"
        if self.reward is not None or (self.has_final_answer and self.stop_reason == "answered"):
            return None
        return "no complete answer"


def count_turns(messages: list[MessageFacts]) -> int | None:
    """Returns the number of assistant messages; None if a message is invalid.

    Every role must be known, every message except the assistant's must have content, and a tool
    reply's id, if any, must belong to an earlier call. With the types of the structs, this rejects
    the same messages as `message_problems`.
    Raises msgspec.ValidationError if the content of a message has a wrong type.
    """
    num_turns = 0
    call_ids: set[str | None] = {None}
    for message in messages:
        role = message.role
        # Content that begins with a quote is a valid string: the decoder has already skipped it.
        # Decoding every content would take longer than all other checks together.
        is_text = message.content < _BYTE_AFTER_QUOTE
        if not is_text and message.decode_content() is None and role != "assistant":
            return None
        if role == "assistant":
            num_turns += 1
            if message.tool_calls:
                for call in message.tool_calls:
                    call_ids.add(call.id)
        elif role == "tool":
            if message.tool_call_id not in call_ids:
                return None
        elif role not in ROLES:
            return None
    return num_turns


def is_plain_rollout(row: RowFields) -> bool:
    """Returns whether a row is a rollout in Stillroom's layout whose fields have the right types.

    Any other row may be a rollout in another layout: all of its fields must be checked.
    """
    has_valid_tool_errors = row.tool_errors is None or type(row.tool_errors) is int
    return isinstance(row.stop_reason, str) and row.has_text_ids and has_valid_tool_errors


def rollout_facts(row: RowFields, num_turns: int) -> RowFacts:
    """Returns the facts of a rollout in Stillroom's layout."""
    return RowFacts(
        row.messages,
        num_turns,
        row.stop_reason,
        row.id,
        row.task_id or None,
        row.reward,
        row.success,
        row.tool_errors,
        row.metadata,
        row.error,
        row.origin,
    )


def is_plain_supervised(row: RowFields) -> bool:
    """Returns whether a row can only be a supervised row.

    Any other row may be one too: all of its fields must be checked.
    """
    return (
        row.stop_reason is msgspec.UNSET
        and row.conversation == NULL
        and row.output is msgspec.UNSET
        and row.responses_create_params is msgspec.UNSET
    )


def supervised_facts(row: RowFields) -> RowFacts | None:
    """Returns the facts of a supervised row; None if the row is not one.

    Raises msgspec.ValidationError if the content of a message has a wrong type.
    """
    messages = row.messages
    # A row with a stop_reason is a rollout; it is passed here only if it has problems.
    if not messages or messages[-1].role != "assistant" or row.stop_reason is not msgspec.UNSET:
        return None
    if not row.has_text_ids or not isinstance(row.rollout_id, _TEXT_OR_NONE):
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

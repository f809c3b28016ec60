"""What the few fields of a rollout that decide what becomes of it come to."""

from typing import TYPE_CHECKING, Any

import msgspec

from stillroom.curate.rows.fields import NULL, CommonFields, MessageFacts, OwnFields
from stillroom.data.checks import ROLES
from stillroom.data.layouts.detect import RolloutLayout
from stillroom.data.layouts.foreign import stop_reason
from stillroom.data.layouts.rnow import failure_of, is_rnow_reward
from stillroom.lines import Line
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD

if TYPE_CHECKING:
    from stillroom.curate._outline import Outline

_STILLROOM, _RNOW = RolloutLayout.STILLROOM, RolloutLayout.RNOW
# Of what begins a JSON value, a text's quote alone sorts before this.
_AFTER_QUOTE = bytearray(b"#")


_MESSAGE = msgspec.json.Decoder(MessageFacts)
_MESSAGES = msgspec.json.Decoder(list[MessageFacts])


class Chat(msgspec.Struct, frozen=True, gc=False):
    """A conversation, as far as it decides."""

    given: list[MessageFacts] | msgspec.Raw
    """The messages, or the JSON list of them: few filters look into it."""
    last: MessageFacts | msgspec.Raw | None
    """The last message, or its JSON."""
    num_turns: int
    """Of the assistant."""
    is_open: bool
    """Whether it does not end with the assistant's word: there is none, or tools are called."""

    @property
    def messages(self) -> list[MessageFacts]:
        """All of it."""
        given = self.given
        if not isinstance(given, list):
            given = _MESSAGES.decode(given)
            # Several filters may look into it.
            msgspec.structs.force_setattr(self, "given", given)
        return given

    @property
    def has_final_answer(self) -> bool:
        """Whether it ends with an assistant's text and not with a tool call."""
        last = self.last
        if self.is_open or last is None:
            return False
        message = last if isinstance(last, MessageFacts) else _MESSAGE.decode(last)
        said = message.said()
        return bool(said.strip() if isinstance(said, str) else said)


class RolloutFacts(msgspec.Struct, frozen=True, gc=False):
    """A rollout row of any layout, as far as it decides."""

    chat: Chat
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
    def messages(self) -> list[MessageFacts]:
        """The conversation."""
        return self.chat.messages

    @property
    def num_turns(self) -> int:
        """Of the assistant."""
        return self.chat.num_turns

    @property
    def has_final_answer(self) -> bool:
        """Whether it ends with an assistant's text and not with a tool call."""
        return self.chat.has_final_answer

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


def chat_of(messages: list[MessageFacts]) -> Chat | None:
    """Returns what messages come to, None if something is wrong with them.

    Every message has a role and its content, and every tool's reply its call. With what the types
    say already, this is all that `message_problems` asks for.
    Raises msgspec.ValidationError of a content that is none.
    """
    num_turns = 0
    called: set[str | None] = {None}
    for message in messages:
        role = message.role
        # What begins as a text is one: the decoder has gone over it.
        is_text = message.content < _AFTER_QUOTE
        if not is_text and message.said() is None and role != "assistant":
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
    return _chat(messages, num_turns)


def outlined_chat(line: Line, outlined: "Outline") -> Chat:
    """Returns what the messages of a line come to, from its outline; nothing is copied."""
    view = memoryview(line.view)
    has_last = outlined.last_start < outlined.last_end
    return Chat(
        msgspec.Raw(view[outlined.start : outlined.end]),
        msgspec.Raw(view[outlined.last_start : outlined.last_end]) if has_last else None,
        outlined.num_turns,
        outlined.is_open,
    )


def _chat(messages: list[MessageFacts], num_turns: int) -> Chat:
    last = messages[-1] if messages else None
    is_open = last is None or last.role != "assistant" or bool(last.tool_calls)
    return Chat(messages, last, num_turns, is_open)


def layout_of_fields(row: CommonFields) -> RolloutLayout | None:
    """Returns whose rollout it is, if these fields are all that matters of it; else None."""
    if row.stop_reason is not None:
        is_plain = isinstance(row.id, str | None) and isinstance(row.task_id, str | None)
        return _STILLROOM if is_plain else None
    says_how_it_went = row.completed is not None or row.success is not None
    # What was written from a row of ours is that row again.
    return _RNOW if says_how_it_went and row.stillroom is NULL else None


def own_facts(
    row: CommonFields | OwnFields,
    chat: Chat,
    reward: float | None,
    metadata: dict[str, Any] | None,
) -> RolloutFacts:
    """Returns the facts of a rollout of ours."""
    return RolloutFacts(
        chat,
        row.stop_reason or "",
        row.id,
        row.task_id or None,
        reward,
        row.success,
        row.tool_errors,
        metadata,
        row.error,
    )


def checked_facts(row: OwnFields) -> RolloutFacts:
    """Returns the facts of a rollout of ours whose messages were checked already."""
    num_turns = [message.role for message in row.messages].count("assistant")
    return own_facts(row, _chat(row.messages, num_turns), row.reward, row.metadata)


def rnow_facts(
    row: CommonFields,
    chat: Chat,
    reward: float | None,
    metadata: dict[str, Any] | None,
) -> RolloutFacts | None:
    """Returns the facts of a rollout of rnow's, as those of what `rollout_from_rnow` makes of it.

    None if it has no messages, or rewards that are neither numbers nor words for their absence.
    """
    if chat.last is None:
        return None
    failure, rewards = None, row.rewards or {}
    are_numbers = _are_numbers(rewards)
    if not are_numbers and not all(map(_is_reward_or_absent, rewards.values())):
        return None
    if row.completed is not True or row.error or not are_numbers:
        told = {"rewards": rewards, "error": row.error, "errors": row.errors}
        failure = failure_of({**told, "completed": row.completed})
    own_id, task_id = row.id, row.task_id
    return RolloutFacts(
        chat,
        _STOP_REASONS[failure is not None, row.truncated is True, chat.is_open],
        own_id if isinstance(own_id, str) else "",
        task_id if isinstance(task_id, str) and task_id else None,
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

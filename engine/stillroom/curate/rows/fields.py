"""The fields of a row that decide what becomes of it, as they are decoded from its line."""

from typing import Any

import msgspec

NULL = msgspec.Raw(b"null")


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

    role: str
    """`chat_of` tells what is none."""
    content: msgspec.Raw = NULL
    """Undecoded: texts are long, and only the last one decides."""
    tool_calls: list[CallFacts] | None = None
    tool_call_id: str | None = None

    def said(self) -> Content:
        """Returns the content. Raises msgspec.ValidationError of what is none."""
        return _CONTENT.decode(self.content)


class OwnFields(msgspec.Struct, frozen=True, gc=False):
    """All that decides of a rollout in our layout that was checked already."""

    messages: list[MessageFacts]
    stop_reason: str
    id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    success: bool | None = None
    tool_errors: int | None = None
    metadata: dict[str, Any] | None = None
    error: Any = None


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


class ShortFields(CommonFields, frozen=True, gc=False):
    """All that decides, but for the messages."""

    reward: float | None = None
    total_reward: float | None = None
    metadata: dict[str, Any] | None = None


class DecodedFields(ShortFields, frozen=True, gc=False):
    """All that decides, decoded in one pass over the line."""

    messages: list[MessageFacts] | None = None
    conversation: list[MessageFacts] | None = None


class RawShortFields(CommonFields, frozen=True, gc=False):
    """The short fields, with the bytes of what goes into training rows."""

    reward: msgspec.Raw = NULL
    total_reward: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL


class RawFields(RawShortFields, frozen=True, gc=False):
    """All that decides, with the bytes of what goes into training rows."""

    messages: msgspec.Raw = NULL
    conversation: msgspec.Raw = NULL


class RolloutParts(msgspec.Struct, frozen=True, gc=False):
    """What of a rollout goes into a training row, as the very bytes it is written with."""

    messages: msgspec.Raw
    tools: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    reward: msgspec.Raw = NULL

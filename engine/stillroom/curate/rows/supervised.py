"""Supervised rows as filters see them, beside rollouts."""

from typing import TYPE_CHECKING

import msgspec

from stillroom.curate.rows.facts import Chat, RolloutFacts, chat_of, outlined_chat
from stillroom.curate.rows.fields import MessageFacts
from stillroom.lines import Line

if TYPE_CHECKING:
    from stillroom.curate._outline import Outline

SUPERVISED = "supervised row"
"""Stands where a rollout says why it ended."""


class _ShortFields(msgspec.Struct, frozen=True):
    """What decides of a supervised row, but for the messages."""

    id: str | None = None
    rollout_id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    success: bool | None = None
    metadata: dict[str, object] | None = None
    stop_reason: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Fields(_ShortFields, frozen=True, kw_only=True):
    messages: list[MessageFacts]


SHORT_FIELDS = _ShortFields.__struct_fields__
_SHORT = msgspec.json.Decoder(_ShortFields)
_DECODED = msgspec.json.Decoder(_Fields)


def supervised_facts(line: Line) -> RolloutFacts | None:
    """Returns the facts of a supervised row; None of what is none.

    Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError of what cannot be read.
    """
    row = _DECODED.decode(line.utf8)
    chat = chat_of(row.messages)
    is_answered = bool(row.messages) and row.messages[-1].role == "assistant"
    return _facts(row, chat) if is_answered and chat is not None else None


def outlined_facts(line: Line, outlined: "Outline") -> RolloutFacts | None:
    """Returns the same from the outline of a row that is no rollout of ours or of rnow's.

    None also of a row that takes a closer look. Raises msgspec.DecodeError.
    """
    if outlined.is_conversation or outlined.is_open or outlined.has_gym_field:
        return None
    return _facts(_SHORT.decode(outlined.fields), outlined_chat(line, outlined))


def _facts(row: _ShortFields, chat: Chat) -> RolloutFacts | None:
    # With a stop_reason it is a rollout, and one that could not be read.
    if row.stop_reason is not msgspec.UNSET:
        return None
    return RolloutFacts(
        chat=chat,
        stop_reason=SUPERVISED,
        id=row.id or row.rollout_id,
        task_id=row.task_id,
        reward=row.reward,
        success=row.success,
        metadata=row.metadata,
    )

"""Checks each message of a source by itself, and digests what of it a later history repeats."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgspec

from stillroom.data.checks import message_problems
from stillroom.files import canonical_json
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.messages import PARTS_LOST, ChatReader
from stillroom.rollout.rewards.answers import without_thinking

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_IDS_REMEMBERED = 4096
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
SYSTEM, USER, ASSISTANT, TOOL = range(4)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A message in our shape, and what joining has to know of it."""

    message: Row
    role: int
    digest: int
    """Stands for what a later history repeats of it: the role, the text and the tool calls, but
    neither reasoning nor ids."""
    calls: tuple[int, ...]
    """Digests of the ids of its tool calls."""
    answered: int
    """A digest of the id of the call that a tool's message answers; 0 if it names none."""
    losses: tuple[str, ...]


def read_message(value: Any) -> ReadMessage:
    """Returns a message of a call's history. Raises UnreadableRowError if no chat can hold it."""
    reader = ChatReader()
    message = reader.message(value)
    calls: list[Row] = message.get("tool_calls", [])
    for index, call in enumerate(calls):
        call.setdefault("id", f"call_{index}")
    if PARTS_LOST in reader.losses:
        raise UnreadableRowError("content of an unknown kind", "its format's reader is needed")
    # Whether a tool's message answers a call is seen in the conversation only.
    problems = message_problems([message])
    problem = next((p for p in problems if not p.field.endswith("tool_call_id")), None)
    if problem is not None:
        field = problem.field.removeprefix("messages[0]").lstrip(".")
        raise UnreadableRowError("unsound message", f"{field} {problem.message}")
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    answered = message.get("tool_call_id")
    return ReadMessage(
        message,
        _ROLES[message["role"]],
        _digest(message["role"], message["content"], message.get("name"), functions),
        tuple(_id_digest(call["id"]) for call in calls),
        0 if answered is None else _id_digest(answered),
        tuple(reader.losses),
    )


def _digest(role: str, text: str, name: str | None, calls: Iterable[tuple[str, str]]) -> int:
    if role == "assistant":
        parts = [role, _trimmed(without_thinking(text))]
        for called, arguments in calls:
            parts += (called, _compared(arguments))
        return _digest_of(*parts)
    if name is None or role == "tool":
        # A tool's name is left out by many histories; a speaker's tells two of them apart.
        return _digest_of(role, _trimmed(text))
    return _digest_of(role, _trimmed(text), name)


def _digest_of(*parts: str) -> int:
    # No text has a byte 0xff, so that other parts never come to the same bytes.
    data = b"\xff".join([part.encode("utf-8", "surrogatepass") for part in parts])
    return int.from_bytes(sha256(data).digest()[:8], "little", signed=True)


@lru_cache(maxsize=_IDS_REMEMBERED)
def _id_digest(name: str) -> int:
    """Returns a digest of an id, which stands in a reply, in its repetition and in a result."""
    return _digest_of(name) or 1


def _trimmed(text: str) -> str:
    return (text.replace("\r\n", "\n") if "\r" in text else text).strip()


def _compared(arguments: str) -> str:
    """Returns the arguments of a call in a form that does not depend on their spelling."""
    try:
        return canonical_json(_ANY.decode(arguments)).decode()
    except _UNREADABLE:
        return arguments.strip()

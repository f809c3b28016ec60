"""Checks each message of a source by itself, and digests what of it a later history repeats."""

from dataclasses import dataclass
from typing import Any

import msgspec

from stillroom.data.checks import Problem, message_problems
from stillroom.files import canonical_json
from stillroom.importing.chat_messages import ChatReader
from stillroom.importing.json_rows import UnreadableRowError
from stillroom.rollout.rewards.answers import without_thinking


@dataclass(frozen=True, slots=True)
class CleanMessage:
    """A message in our shape, and what the importer knows of it besides."""

    message: dict[str, Any]
    digest: int
    """A digest of what a later history repeats of it: the role, the text and the tool calls, but
    neither reasoning nor ids. Equal only within this process."""
    call_ids: tuple[str, ...]
    losses: tuple[str, ...]


def clean_message(raw: Any) -> CleanMessage:
    """Returns a message of the OpenAI chat shape, in any spelling, in ours.

    Raises UnreadableRowError for one that no chat can hold.
    """
    reader = ChatReader()
    message = reader.message(raw)
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    for index, call in enumerate(calls):
        call.setdefault("id", f"call_{index}")
    # Whether a tool's message answers a call is seen in the conversation only.
    problem = next((p for p in message_problems([message]) if not _is_of_others(p)), None)
    if problem is not None:
        field = problem.field.removeprefix("messages[0]").lstrip(".")
        raise UnreadableRowError("unsound message", f"{field} {problem.message}")
    ids = tuple(call["id"] for call in calls)
    return CleanMessage(message, _digest(message, calls), ids, tuple(reader.losses))


def _is_of_others(problem: Problem) -> bool:
    return problem.field.endswith("tool_call_id")


def _digest(message: dict[str, Any], calls: list[dict[str, Any]]) -> int:
    text: str = message["content"]
    if message["role"] == "assistant":
        made = tuple((call["function"]["name"], _compared(call)) for call in calls)
        return hash(("assistant", _trimmed(without_thinking(text)), made))
    # A tool's name is left out by many histories; a speaker's tells two of them apart.
    name = None if message["role"] == "tool" else message.get("name")
    return hash((message["role"], _trimmed(text), name))


def _trimmed(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _compared(call: dict[str, Any]) -> bytes:
    """Returns the arguments of a call in a form that does not depend on their spelling."""
    arguments: str = call["function"]["arguments"]
    try:
        return canonical_json(msgspec.json.decode(arguments))
    except (msgspec.DecodeError, RecursionError):
        return arguments.strip().encode("utf-8", errors="surrogatepass")

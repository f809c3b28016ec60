"""What must come out of the samples that tools wrote of the scripted endpoint's calls."""

import json
from pathlib import Path
from typing import Any

from stillroom.importing.records import LoggedConversation
from trace_samples.conversation import REPLIES, compared, expected_messages, tool_schemas

ENDINGS = ["tool_calls", "stop", "length"]


def write_rows(path: Path, *rows: Any) -> Path:
    """A file with a row on each line; a row of bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def calls_of(rows: list[Any]) -> list[LoggedConversation]:
    """The calls among the rows of a reader, which must all be calls of this sample."""
    calls = [row for row in rows if isinstance(row, LoggedConversation)]
    assert all(call.is_call for call in calls)
    return calls


def assert_holds_conversation(
    calls: list[LoggedConversation],
    *,
    num_calls: int = 3,
    keeps_reasoning: bool,
    loses_reasoning: bool = False,
    has_finish: bool = True,
    has_tools: bool = True,
    model: str = "scripted-1",
) -> None:
    """Checks the calls, or the first of them, against the script of the endpoint.

    `keeps_reasoning` says whether the client sent it back; a log may lose it everywhere.
    """
    calls = sorted(calls, key=lambda call: len(call.messages))
    assert len(calls) == num_calls
    expected = expected_messages(keeps_reasoning=keeps_reasoning)[:num_calls]
    replies = REPLIES[:num_calls]
    if loses_reasoning:
        expected = [[_without_reasoning(message) for message in call] for call in expected]
    read_messages = [[compared(message) for message in call.messages] for call in calls]
    assert read_messages == [[compared(message) for message in call] for call in expected]
    counts = [(call.usage.prompt_tokens, call.usage.completion_tokens) for call in calls]
    assert counts == [(reply.prompt_tokens, reply.completion_tokens) for reply in replies]
    assert {call.model for call in calls} == {model}
    if has_finish:
        assert [call.finish_reason for call in calls] == ENDINGS[:num_calls]
    if has_tools:
        wanted = [_plain(tool) for tool in tool_schemas()]
        assert [[_plain(tool) for tool in call.tools] for call in calls] == [wanted] * num_calls
    assert ["images left out" in call.dropped for call in calls] == [False, False, True][:num_calls]


def _plain(tool: dict[str, Any]) -> dict[str, Any]:
    return {key: tool["function"][key] for key in ("name", "description", "parameters")}


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def plain_conversation() -> list[tuple[str, str]]:
    """The role and the text of each message of the whole conversation."""
    whole = expected_messages(keeps_reasoning=True)[-1]
    return [(message["role"], message["content"]) for message in whole]

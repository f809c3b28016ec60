"""Reads trajectories of SWE-agent and mini-swe-agent."""

from collections.abc import Iterator
from pathlib import Path

from stillroom.data.checks import Problem, as_number, decode_row
from stillroom.importing.formats.sessions.message_tree import NO_REPLY
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    make_row_reader,
)
from stillroom.importing.payloads.calls import responses_messages
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    first_text,
    usage_of,
    without_empty,
)
from stillroom.importing.payloads.messages import MessageReader
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat
from stillroom.types import Usage

_EXIT_ROLE = "exit"
"""The role of mini-swe-agent's last message, which has its exit status."""


def _trajectory(row: JsonRow) -> Iterator[SourceRow]:
    """Yields the conversation of a trajectory. Raises UnreadableRowError if it has no reply."""
    data, reader = row.data, MessageReader()
    is_mini = "trajectory_format" in data
    steps = [as_row(step) for step in as_list(data.get("messages" if is_mini else "history"))]
    convert = _mini_messages if is_mini else _messages
    messages = [message for step in steps for message in convert(step, reader)]
    if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in messages):
        raise UnreadableRowError(NO_REPLY, "the agent ended before the model's first reply")
    info = as_row(data.get("info"))
    stats = as_row(info.get("model_stats"))
    yield LoggedConversation(
        location=row.location,
        messages=messages,
        is_call=False,
        id=first_text(data, "instance_id"),
        model=_model_of(data, info),
        usage=_usage(stats, steps),
        cost_usd=as_number(stats.get("instance_cost")),
        dropped=tuple(reader.dropped),
        metadata=without_empty(
            agent="mini-swe-agent" if is_mini else "swe-agent",
            environment=first_text(data, "environment"),
            exit_status=info.get("exit_status"),
            submission=info.get("submission"),
        ),
    )


def _messages(step: Row, reader: MessageReader) -> list[Row]:
    """Returns the messages of an entry in SWE-agent's history.

    Replies in a demonstration get weight 0, so that they are not trained on.
    """
    message = {key: value for key, value in step.items() if key not in ("thinking", "reasoning")}
    thoughts = [
        text
        for block in map(as_row, as_list(step.get("thinking_blocks")))
        if (text := first_text(block, "thinking"))
    ]
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    call_ids = as_list(step.get("tool_call_ids"))
    if step.get("role") == "tool" and call_ids and "tool_call_id" not in step:
        message["tool_call_id"] = call_ids[0]
    if step.get("is_demo") is True and step.get("role") == "assistant":
        message["weight"] = 0
    return reader.turn({key: value for key, value in message.items() if key != "name"})


def _mini_messages(step: Row, reader: MessageReader) -> list[Row]:
    """Returns the messages of an entry of mini-swe-agent, including Responses API entries."""
    if step.get("role") == _EXIT_ROLE:
        return []
    if step.get("object") == "response":
        return responses_messages(step.get("output"), reader, role="assistant")
    if isinstance(step.get("type"), str) and "role" not in step:
        return responses_messages([step], reader)
    return reader.turn(step)


def _model_of(data: Row, info: Row) -> str | None:
    """Returns the model's name from the configuration in a trajectory."""
    config = as_row(info.get("config"))
    if "replay_config" in data:
        replayed = data["replay_config"]
        decoded = decode_row(replayed.encode()) if isinstance(replayed, str) else as_row(replayed)
        config = {} if isinstance(decoded, Problem) else as_row(decoded.get("agent"))
    return first_text(as_row(config.get("model")), "model_name", "name")


def _usage(stats: Row, steps: list[Row]) -> Usage | None:
    """Returns the usage of a trajectory, from its totals or from its replies."""
    total = usage_of(
        {
            "prompt_tokens": stats.get("tokens_sent"),
            "completion_tokens": stats.get("tokens_received"),
        }
    )
    if total is not None:
        return total
    replies = [as_row(as_row(step.get("extra")).get("response")) for step in steps]
    usages = [usage for reply in replies if (usage := usage_of(reply.get("usage"))) is not None]
    return sum(usages, Usage()) if usages else None


def _is_recognised(path: Path, head: bytes) -> bool:
    return any(
        str(row.get("trajectory_format")).startswith("mini-swe-agent")
        or (
            isinstance(row.get("trajectory"), list)
            and bool({"history", "environment"} & row.keys())
        )
        or _is_mini_head(row)
        for row in head_rows(head)
    )


def _is_mini_head(row: Row) -> bool:
    """Returns whether a row begins like a mini-swe-agent file, whose format name is at the end."""
    info = as_row(row.get("info"))
    return "mini_version" in info or {"exit_status", "submission", "model_stats"} <= info.keys()


SWE_AGENT = TraceFormat(
    name="swe_agent",
    title="SWE-agent and mini-swe-agent trajectories",
    is_recognised=_is_recognised,
    read=make_row_reader(_trajectory),
)

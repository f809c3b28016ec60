"""Reads a model call from the bodies of its request and response.

The bodies are those of OpenAI's chat completions and Responses and of Anthropic's Messages, which
gateways and observability tools log within rows of their own formats.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stillroom.data.checks import describe
from stillroom.data.layouts.responses import item_problems, messages_from_items
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    finish_reason_of,
    first_text,
    iso_time,
    text_of,
    usage_details,
    usage_of,
)
from stillroom.importing.payloads.messages import (
    NO_MESSAGES,
    REASONING_DROPPED,
    SERVER_TOOLS_DROPPED,
    MessageReader,
    tool_schemas,
)
from stillroom.importing.payloads.streams import assemble_if_streamed
from stillroom.importing.records import Location, LoggedConversation
from stillroom.types import Usage

NO_CALL = "no model call"
NO_CONTENTS = "contents were not recorded"
NO_REPLY = "no reply"
NO_REQUEST = "no request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One reply to one request, with the fields that the two bodies have."""

    messages: list[Row]
    """The request's messages, followed by the reply unless the call failed."""
    tools: list[Row] | None = None
    id: str | None = None
    provider: str | None = None
    model: str | None = None
    usage: Usage | None = None
    cost_usd: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    started_at: str | None = None
    dropped: tuple[str, ...] = ()
    metadata: Row = field(default_factory=dict[str, Any])


def logged_calls(
    location: Location,
    calls: Iterable[ApiCall],
    log_fields: Row | None = None,
    *,
    metadata: Row | None = None,
    provider: str | None = None,
    part: str | None = None,
    merged_from: tuple[Location, ...] = (),
) -> Iterator[LoggedConversation]:
    """Yields the calls of a logged row: one per choice of the response.

    `log_fields` are the log's own values of fields; they take precedence over those of the bodies.
    The second and later choices get a location and an id of their own, with `part` as the prefix.
    `merged_from` are the locations of other rows that were merged into the first choice.
    """
    for number, call in enumerate(calls):
        fields = {name: getattr(call, name) for name in call.__slots__}
        fields |= {"provider": call.provider or provider} | (log_fields or {})
        fields["metadata"] = call.metadata | (metadata or {})
        if call.id is not None and call.id != fields["id"]:
            fields["ids"] = {"response_id": call.id} | fields.get("ids", {})
        if number:
            choice_part = f"{part} choice {number}" if part else f"choice {number}"
            location = Location(location.path, location.line, choice_part)
            fields["id"] = f"{fields['id']}#{number}" if fields["id"] else None
        fields["merged_from"] = () if number else merged_from
        yield LoggedConversation(location=location, is_call=True, **fields)


def read_calls(request: Any, response: Any) -> list[ApiCall]:
    """Returns the calls of a request: one per choice of the response.

    Raises UnreadableRowError if the request has no messages, or the response has no reply.
    """
    request_body = as_row(request)
    if not request_body:
        raise UnreadableRowError(NO_REQUEST, f"the request is {describe(request)}")
    reader = MessageReader()
    prompt = request_messages(request_body, reader)
    response = assemble_if_streamed(response)
    reply = as_row(response)
    tools = offered_tools(request_body)
    failure = failure_text(response)
    if failure is not None:
        dropped = tuple(reader.dropped)
        model = first_text(request_body, "model")
        return [ApiCall(messages=prompt, tools=tools, model=model, error=failure, dropped=dropped)]
    fields: Row = {
        "tools": tools,
        "id": first_text(reply, "id"),
        "model": first_text(reply, "model") or first_text(request_body, "model"),
        "usage": usage_of(reply.get("usage")),
        "started_at": iso_time(reply.get("created", reply.get("created_at"))),
    }
    details = usage_details(reply.get("usage"))
    return [
        ApiCall(
            messages=[*prompt, *messages],
            finish_reason=finish_reason,
            dropped=tuple(reader.dropped),
            metadata=dict(details),
            **fields,
        )
        for messages, finish_reason in replies(response, reader)
    ]


def offered_tools(request: Row) -> list[Row] | None:
    """Returns the schemas of a request's tools, without those that the provider runs.

    Returns None if the request has no tools.
    """
    tools = [
        tool
        for tool in as_list(request.get("tools"))
        if isinstance(tool, dict) and not is_provider_tool(cast("Row", tool))
    ]
    legacy = [{"function": function} for function in as_list(request.get("functions"))]
    return tool_schemas([*tools, *legacy])


def is_provider_tool(tool: Row) -> bool:
    """Returns whether a tool is run by the provider, such as a web search."""
    return tool.get("type") not in (None, "function", "custom") or (
        not tool.get("name") and "function" not in tool and "custom" not in tool
    )


def request_messages(request: Row, reader: MessageReader) -> list[Row]:
    """Returns the messages of a request, with the system prompt first.

    Raises UnreadableRowError if there are no messages.
    """
    messages = request.get("messages")
    if messages is None and "input" in request:
        return [*system_message(request.get("instructions"), reader),
                *responses_messages(request["input"], reader)]  # fmt: skip
    if not as_list(messages):
        raise UnreadableRowError(NO_MESSAGES, f"the request's messages are {describe(messages)}")
    return [*system_message(request.get("system"), reader), *reader.turns(messages)]


def system_message(value: Any, reader: MessageReader) -> list[Row]:
    """Returns a list with the text of `value` as a system message; empty if there is no text."""
    text = reader.text(value)
    return [{"role": "system", "content": text}] if text else []


def responses_messages(value: Any, reader: MessageReader, *, role: str = "user") -> list[Row]:
    """Returns the messages of an `input` or `output` of the Responses API.

    role: the role of a plain string; `assistant` for an output. Raises UnreadableRowError if the
    value is neither a string nor a list of items.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    items = [read_item(item, reader) for item in as_list(value)]
    convertible = [item for item in items if item is not None]
    problem = next(item_problems(convertible if isinstance(value, list) else value, "input"), None)
    if problem is not None:
        raise UnreadableRowError("items of an unknown kind", f"{problem.field} {problem.message}")
    messages = messages_from_items(convertible)
    return [message | {"content": reader.text(message.get("content"))} for message in messages]


def read_item(value: Any, reader: MessageReader) -> Any:
    """Returns an item in the form that `messages_from_items` converts.

    Returns None for an item that cannot be converted (reasoning without text, or a tool that the
    provider runs), and notes it in `reader.dropped`.
    """
    item = as_row(value)
    kind = item.get("type")
    match kind:
        case "custom_tool_call":
            return item | {"type": "function_call", "arguments": item.get("input") or ""}
        case "custom_tool_call_output":
            return item | {"type": "function_call_output"}
        case "reasoning":
            texts = [*as_list(item.get("summary")), *as_list(item.get("content"))]
            if not any(text_of(as_row(part).get("text")) for part in texts):
                reader.drop(REASONING_DROPPED)
                return None
            return item
        case str() if kind not in ("message", "function_call", "function_call_output"):
            reader.drop(SERVER_TOOLS_DROPPED)
            return None
        case _:
            return value


def replies(response: Any, reader: MessageReader) -> list[tuple[list[Row], str | None]]:
    """Returns the messages and the finish reason of each reply in a response.

    Raises UnreadableRowError if there is no reply.
    """
    if isinstance(response, str) and response:
        return [([{"role": "assistant", "content": response}], None)]
    reply = as_row(response)
    if isinstance(reply.get("choices"), list):
        return _choices(as_list(reply["choices"]), reader)
    if isinstance(reply.get("output"), list):
        return [(responses_messages(reply["output"], reader), _response_finish_reason(reply))]
    if reply.get("role") == "assistant" or reply.get("type") == "message":
        turns = reader.turn(reply | {"role": "assistant"}, "the reply")
        finish_reason = finish_reason_of(reply.get("stop_reason", reply.get("finish_reason")))
        return [(turns, finish_reason)]
    raise UnreadableRowError(NO_REPLY, f"the response is {describe(response)}")


def _choices(choices: Sequence[Any], reader: MessageReader) -> list[tuple[list[Row], str | None]]:
    """Returns the messages and the finish reason of each choice of a chat completion."""
    found_replies = [
        (reader.turn(choice["message"], "the reply"), finish_reason_of(choice.get("finish_reason")))
        for choice in map(as_row, choices)
        if isinstance(choice.get("message"), dict)
    ]
    if not found_replies:
        raise UnreadableRowError(NO_REPLY, "no choice of the response has a message")
    return found_replies


def _response_finish_reason(response: Row) -> str | None:
    """Returns the finish reason of a response of the Responses API."""
    incomplete = as_row(response.get("incomplete_details")).get("reason")
    if incomplete:
        return finish_reason_of(incomplete)
    kinds = {text_of(as_row(item).get("type")) for item in as_list(response.get("output"))}
    if kinds & {"function_call", "custom_tool_call"}:
        return "tool_calls"
    return finish_reason_of(response.get("status"))


def failure_text(response: Any) -> str | None:
    """Returns the error message that a response has instead of a reply; None if it has none."""
    fields = as_row(response)
    error = fields.get("error")
    if not error or fields.get("choices"):
        return None
    if isinstance(error, str):
        return error
    details = as_row(error)
    parts = (details.get("code") or details.get("type"), details.get("message"))
    return ": ".join(str(part) for part in parts if part) or "unknown"

"""Reads a call of Gemini's generateContent from the bodies of the API or of Google's SDK.

Field names are in camelCase in the API, and in snake_case in the SDK.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

from stillroom.data.checks import describe
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.calls import NO_REPLY, ApiCall, failure_text
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    finish_reason_of,
    first_text,
    iso_time,
    text_of,
)
from stillroom.importing.payloads.messages import (
    AUDIO_DROPPED,
    FILES_DROPPED,
    IMAGES_DROPPED,
    NO_MESSAGES,
    PARTS_DROPPED,
    SERVER_TOOLS_DROPPED,
    json_text,
    tool_schemas,
)
from stillroom.importing.payloads.streams import stream_events
from stillroom.types import Usage

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
_MEDIA = {"image": IMAGES_DROPPED, "audio": AUDIO_DROPPED}
_NOT_CONTENT = {"thought", "thought_signature", "function_call", "function_response"}
_WRAPPERS = ("output", "result")
"""The fields in which the API and the SDK wrap a tool's result that is not an object."""
_PROVIDER_TOOLS = ("executable_code", "code_execution_result")
_FILTERED = ("safety", "recitation", "blocklist", "prohibited_content", "spii")


def is_gemini(request: Row) -> bool:
    """Returns whether a request body is one of generateContent."""
    return "contents" in request and "messages" not in request


def gemini_calls(request: Row, response: Any, path: str) -> list[ApiCall]:
    """Returns the calls of a request and its response: one per candidate.

    `path` is the URL that was called, which names the model. Raises UnreadableRowError if the
    request has no messages, or the response has no reply.
    """
    request = _snake_case_fields(request)
    config = (
        request
        | _snake_case_fields(request.get("config"))
        | _snake_case_fields(request.get("generation_config"))
    )
    reader = _ContentsReader()
    reader.add_system(config.get("system_instruction"))
    reader.add_contents(request.get("contents"))
    reply = _assemble_reply(response)
    feedback = _snake_case_fields(reply.get("prompt_feedback"))
    failure = failure_text(reply)
    if failure is None and not reply.get("candidates"):
        failure = text_of(feedback.get("block_reason"))
    model = first_text(reply, "model_version") or first_text(request, "model") or _model_of(path)
    usage, details = _usage(_snake_case_fields(reply.get("usage_metadata")))
    call = ApiCall(
        messages=reader.messages,
        tools=_tools(config.get("tools")),
        id=first_text(reply, "response_id"),
        model=None if model is None else model.removeprefix("models/"),
        usage=usage,
        error=failure,
        started_at=iso_time(reply.get("create_time")),
        dropped=tuple(reader.dropped),
        metadata=details,
    )
    if failure is not None:
        return [call]
    candidates = list(map(_snake_case_fields, as_list(reply.get("candidates"))))
    if not candidates:
        raise UnreadableRowError(NO_REPLY, f"the response is {describe(response)}")
    return [_with_reply(call, reader.copy(), candidate) for candidate in candidates]


def _with_reply(call: ApiCall, reader: "_ContentsReader", candidate: Row) -> ApiCall:
    """Returns a call with the reply of one candidate."""
    reader.add_turn({"role": "model"} | as_row(candidate.get("content")))
    finish_reason = finish_reason_of(candidate.get("finish_reason"))
    if finish_reason in _FILTERED:
        finish_reason = "content_filter"
    if finish_reason == "stop" and reader.messages[-1].get("tool_calls"):
        finish_reason = "tool_calls"
    return replace(
        call,
        messages=reader.messages,
        finish_reason=finish_reason,
        dropped=tuple(reader.dropped),
        metadata=dict(call.metadata),
    )


class _ContentsReader:
    """Converts Gemini's contents to chat messages; a call without an id gets `call_{number}`."""

    def __init__(self) -> None:
        self.messages: list[Row] = []
        self.dropped: dict[str, None] = {}
        self._num_calls = 0
        self._unanswered_calls: list[tuple[str, str]] = []
        """The names and ids of the calls without a result so far."""

    def copy(self) -> "_ContentsReader":
        """Returns an independent copy."""
        other = _ContentsReader()
        other.messages, other.dropped = list(self.messages), dict(self.dropped)
        other._num_calls, other._unanswered_calls = self._num_calls, list(self._unanswered_calls)
        return other

    def add_system(self, value: Any) -> None:
        """Adds the system instruction, given as a string, parts or a content."""
        parts = as_row(value).get("parts", value)
        text = "".join(self._texts(_parts(parts)))
        if text:
            self.messages.append({"role": "system", "content": text})

    def add_contents(self, value: Any) -> None:
        """Adds a request's contents: a string, a list of strings or parts, or turns with parts."""
        contents = as_list(value) or ([value] if value else [])
        if not contents:
            raise UnreadableRowError(NO_MESSAGES, f"contents are {describe(value)}")
        if all("parts" not in as_row(content) for content in contents):
            self.add_turn({"parts": contents})
            return
        for content in contents:
            row = as_row(content)
            self.add_turn(row if "parts" in row else {"parts": [content]})

    def add_turn(self, content: Row) -> None:
        """Adds a turn of the user or the model, including its tool results."""
        parts = list(_parts(content.get("parts")))
        for part in parts:
            if "function_response" in part:
                self.messages.append(self._result(_snake_case_fields(part["function_response"])))
        if content.get("role") == "model":
            self.messages.append(self._reply(parts))
            return
        texts = list(self._texts(parts))
        if texts or not any("function_response" in part for part in parts):
            self.messages.append({"role": "user", "content": "".join(texts)})

    def _reply(self, parts: list[Row]) -> Row:
        """Returns an assistant message with the text, thoughts and calls of the parts."""
        thoughts = [part for part in parts if part.get("thought")]
        reply: Row = {
            "role": "assistant",
            "content": "".join(self._texts(part for part in parts if not part.get("thought"))),
        }
        if thoughts:
            reply["reasoning_content"] = "".join(self._texts(thoughts))
        calls = [
            self._call(_snake_case_fields(p["function_call"]))
            for p in parts
            if "function_call" in p
        ]
        return reply | ({"tool_calls": calls} if calls else {})

    def _call(self, call: Row) -> Row:
        """Converts a function call to a tool call."""
        name = call.get("name")
        if not isinstance(name, str):
            raise UnreadableRowError("a tool call has no name", f"the call is {describe(call)}")
        call_id = text_of(call.get("id")) or f"call_{self._num_calls}"
        self._num_calls += 1
        self._unanswered_calls.append((name, call_id))
        function = {"name": name, "arguments": json_text(call.get("args"))}
        return {"id": call_id, "type": "function", "function": function}

    def _result(self, result: Row) -> Row:
        """Returns a tool message that answers the call with its id, or the first with its name."""
        result_id, name = text_of(result.get("id")), result.get("name")
        answered = next(
            (
                call
                for call in self._unanswered_calls
                if (call[1] == result_id if result_id else call[0] == name)
            ),
            None,
        )
        message: Row = {"role": "tool", "content": _output(result.get("response"))}
        if answered is not None:
            self._unanswered_calls.remove(answered)
        call_id = result_id if answered is None else answered[1]
        return message if call_id is None else message | {"tool_call_id": call_id}

    def _texts(self, parts: Iterable[Row]) -> Iterator[str]:
        """Yields the texts of parts; notes in `dropped` the parts that a message cannot have."""
        for part in parts:
            if isinstance(part.get("text"), str):
                yield part["text"]
            elif "inline_data" in part or "file_data" in part:
                media = _snake_case_fields(part.get("inline_data") or part.get("file_data"))
                kind = str(media.get("mime_type") or "").partition("/")[0]
                self.dropped[_MEDIA.get(kind, FILES_DROPPED)] = None
            elif any(name in part for name in _PROVIDER_TOOLS):
                self.dropped[SERVER_TOOLS_DROPPED] = None
            elif part.keys() - _NOT_CONTENT:
                self.dropped[PARTS_DROPPED] = None


def _output(response: Any) -> str:
    """Returns a tool's result as text."""
    fields = as_row(response)
    only = next(iter(fields)) if len(fields) == 1 else None
    return json_text(fields[only] if only in _WRAPPERS else response)


def _snake_case_fields(value: Any) -> Row:
    """Returns an object with its field names in snake_case, without null fields."""
    return {
        _CAPITAL.sub("_", name).lower(): item
        for name, item in as_row(value).items()
        if item is not None
    }


def _parts(value: Any) -> Iterator[Row]:
    for part in as_list(value) or ([value] if value else []):
        yield {"text": part} if isinstance(part, str) else _snake_case_fields(part)


def _assemble_reply(response: Any) -> Row:
    """Returns a response, assembled from its chunks if it was streamed."""
    if isinstance(response, str):
        response = list(stream_events(response)) if response.lstrip().startswith("data:") else None
    if not isinstance(response, list):
        return _snake_case_fields(response)
    body: Row = {}
    candidates: dict[int, Row] = {}
    for chunk in map(_snake_case_fields, cast("list[Any]", response)):
        body |= chunk
        for position, candidate in enumerate(
            map(_snake_case_fields, as_list(chunk.get("candidates")))
        ):
            index = candidate.get("index", position)
            assembled = candidates.setdefault(
                index if isinstance(index, int) else position, {"parts": []}
            )
            assembled["parts"] += as_list(as_row(candidate.get("content")).get("parts"))
            assembled |= {key: item for key, item in candidate.items() if key != "content"}
    return body | {
        "candidates": [
            {**candidate, "content": {"role": "model", "parts": candidate["parts"]}}
            for _, candidate in sorted(candidates.items())
        ]
    }


def _tools(value: Any) -> list[Row] | None:
    """Returns the schemas of the functions that a request declares."""
    declared = [
        _snake_case_fields(function)
        for tool in map(_snake_case_fields, as_list(value))
        for function in as_list(tool.get("function_declarations"))
    ]
    return tool_schemas(
        [
            function
            | {"parameters": function.get("parameters_json_schema")
               or _schema(function.get("parameters"))}
            for function in declared
        ]
    )  # fmt: skip


def _schema(value: Any) -> Any:
    """Converts the type names of a schema to JSON Schema, e.g. OBJECT to object."""
    if isinstance(value, list):
        return [_schema(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = {key: _schema(item) for key, item in cast("Row", value).items() if item is not None}
    kind = fields.get("type")
    return fields | ({"type": kind.lower()} if isinstance(kind, str) else {})


def _usage(counts: Row) -> tuple[Usage | None, Row]:
    """Returns a call's usage, with thoughts as completion tokens, and its detail counts."""

    def number(*names: str) -> int:
        values = (counts.get(f"{name}_token_count") for name in names)
        return sum(value for value in values if isinstance(value, int))

    if not counts:
        return None, {}
    usage = Usage(
        prompt_tokens=number("prompt", "tool_use_prompt"),
        completion_tokens=number("candidates", "thoughts"),
    )
    details = {
        "cache_read_tokens": number("cached_content"),
        "reasoning_tokens": number("thoughts"),
    }
    return usage, {name: count for name, count in details.items() if count}


def _model_of(path: str) -> str | None:
    match = re.search(r"models/([^/:?]+)", path)
    return match[1] if match else None

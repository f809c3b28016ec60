"""Assembles the events of a streamed reply into the body of the unstreamed reply."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.fields import as_list, as_row

NO_END = "the stream is incomplete"
BROKEN_STREAM = "an event of the stream is not JSON"
_LINE_END = re.compile(r"\r\n|\n|\r")
_TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def stream_events(text: str) -> Iterator[Row]:
    """Yields the JSON object of each server-sent event, without `[DONE]`.

    Raises UnreadableRowError for an event whose data is not a JSON object.
    """
    lines: list[str] = []
    for line in [*(_LINE_END.split(text) if "\r" in text else text.split("\n")), ""]:
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            data, lines = "\n".join(lines), []
            if data.strip() != "[DONE]":
                yield _decode_event(data)


def _decode_event(data: str) -> Row:
    """Decodes the data of an event. Raises UnreadableRowError if it is not a JSON object."""
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableRowError(BROKEN_STREAM, str(error)[:200]) from error
    if not isinstance(value, dict):
        raise UnreadableRowError(BROKEN_STREAM, "an event's data is JSON, but not an object")
    return value


def assemble_reply(events: Iterable[Row]) -> Row:
    """Returns the unstreamed body of a reply of any of the three APIs.

    Raises UnreadableRowError if the stream is incomplete.
    """
    all_events = list(events)
    failure = next((event for event in all_events if _is_failure(event)), None)
    if failure is not None:
        return {"error": failure.get("error") or failure}
    if any("choices" in event for event in all_events):
        return assemble_completion(all_events, is_complete=True)
    if any(str(event.get("type", "")).startswith("response.") for event in all_events):
        return assemble_response(all_events)
    return assemble_message(all_events)


def assemble_if_streamed(response: Any) -> Any:
    """Returns the unstreamed body of a reply that is logged as a stream's text or events.

    Returns any other response unchanged. Raises UnreadableRowError if the stream is incomplete.
    """
    if isinstance(response, str) and response.lstrip().startswith(("data:", "event:")):
        return assemble_reply(stream_events(response))
    events = [as_row(event) for event in as_list(response)]
    first = events[0] if events else {}
    if first.get("type") in ("message_start", "response.created"):
        return assemble_reply(events)
    return response


def _is_failure(event: Row) -> bool:
    return event.get("type") == "error" or (bool(event.get("error")) and not event.get("choices"))


def assemble_completion(chunks: Iterable[Row], *, is_complete: bool) -> Row:
    """Assembles a chat completion from its chunks.

    With `is_complete`, raises UnreadableRowError if a choice has no finish reason.
    """
    choices: dict[int, _StreamedChoice] = {}
    fields: Row = {}
    for chunk in chunks:
        fields |= {key: value for key, value in chunk.items() if value is not None}
        for choice in map(as_row, as_list(chunk.get("choices"))):
            choices.setdefault(_index(choice) or 0, _StreamedChoice()).add(choice)
    assembled = [choices[index].assemble() for index in sorted(choices)]
    if is_complete and not all(choice["finish_reason"] for choice in assembled):
        raise UnreadableRowError(NO_END, "a choice has no finish_reason")
    return fields | {"object": "chat.completion", "choices": assembled}


def _index(row: Row) -> int | None:
    index = row.get("index")
    return index if isinstance(index, int) and not isinstance(index, bool) else None


class _StreamedChoice:
    """Assembles one choice of a streamed chat completion."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[_StreamedCall] = []
        self._legacy: _StreamedCall | None = None
        self._has_audio = False
        self._finish_reason: Any = None

    def add(self, choice: Row) -> None:
        """Adds the delta of one chunk."""
        delta = as_row(choice.get("delta"))
        for key, value in delta.items():
            if isinstance(value, str) and key != "role":
                self._texts.setdefault(key, []).append(value)
        for call in map(as_row, as_list(delta.get("tool_calls"))):
            self._call_for(call).add(call, as_row(call.get("function")))
        if legacy := as_row(delta.get("function_call")):
            self._legacy = self._legacy or _StreamedCall(None)
            self._legacy.add({}, legacy)
        self._has_audio = self._has_audio or bool(delta.get("audio"))
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _call_for(self, delta: Row) -> "_StreamedCall":
        """Returns the call that a delta belongs to.

        A delta has the index of its call. Some endpoints omit the index, or send the same one for
        every call; but they send each call in one delta, so that a new id means a new call.
        """
        index, call_id = _index(delta), delta.get("id")
        for call in reversed(self._calls):
            if call.index == index:
                if call_id and call.row.get("id") not in (None, call_id):
                    break
                return call
        self._calls.append(_StreamedCall(index))
        return self._calls[-1]

    def assemble(self) -> Row:
        """Returns the choice as in an unstreamed reply."""
        texts = {key: "".join(pieces) for key, pieces in self._texts.items()}
        message: Row = {"role": "assistant", "content": None, **texts}
        if self._calls:
            message["tool_calls"] = [call.assemble() for call in self._calls]
        if self._legacy is not None:
            message["function_call"] = self._legacy.assemble()["function"]
        if self._has_audio:
            message["audio"] = {"id": "streamed"}
        return {"message": message, "finish_reason": self._finish_reason}


class _StreamedCall:
    """Assembles one tool call of a stream."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.row: Row = {}
        self._pieces: dict[str, list[str]] = {"name": [], "arguments": []}

    def add(self, call: Row, function: Row) -> None:
        """Adds a delta: the fields of the call and of its function."""
        self.row |= {key: value for key, value in call.items() if key in ("id", "type") and value}
        for key, pieces in self._pieces.items():
            if isinstance(function.get(key), str):
                pieces.append(function[key])

    def assemble(self) -> Row:
        """Returns the call as in an unstreamed reply."""
        function = {key: "".join(pieces) for key, pieces in self._pieces.items()}
        return {**self.row, "function": function}


def assemble_response(events: Iterable[Row]) -> Row:
    """Returns the response object at the end of a stream of the Responses API.

    An empty `output` is filled with the items that the stream completed before. Raises
    UnreadableRowError if the stream is incomplete.
    """
    items: dict[int, Any] = {}
    for event in events:
        if event.get("type") == "response.output_item.done":
            index = event.get("output_index")
            items[index if isinstance(index, int) else len(items)] = event.get("item")
        if event.get("type") in _TERMINAL:
            response = as_row(event.get("response"))
            done = [items[index] for index in sorted(items)]
            return response | {"output": as_list(response.get("output")) or done}
    raise UnreadableRowError(NO_END, "there is no event `response.completed`")


def assemble_message(events: Iterable[Row]) -> Row:
    """Assembles an Anthropic message from the events of a stream.

    Raises UnreadableRowError if the stream is incomplete.
    """
    message: Row = {}
    blocks: dict[int, _StreamedBlock] = {}
    for event in events:
        match event.get("type"):
            case "message_start":
                message = dict(as_row(event.get("message")))
            case "content_block_start":
                block = as_row(event.get("content_block"))
                blocks[_index(event) or 0] = _StreamedBlock(block)
            case "content_block_delta" if (_index(event) or 0) in blocks:
                blocks[_index(event) or 0].add(as_row(event.get("delta")))
            case "message_delta":
                message |= as_row(event.get("delta"))
                # message_delta repeats the counts that changed since message_start.
                usage = as_row(event.get("usage"))
                counts = {key: value for key, value in usage.items() if value is not None}
                message["usage"] = as_row(message.get("usage")) | counts
            case _:
                pass
    if not message.get("stop_reason"):
        raise UnreadableRowError(NO_END, "no event has a stop_reason")
    return message | {"content": [blocks[index].assemble() for index in sorted(blocks)]}


_BLOCK_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class _StreamedBlock:
    """Assembles one content block of an Anthropic message."""

    def __init__(self, block: Row) -> None:
        self._block = block
        self._pieces: dict[str, list[str]] = {}
        self._input: list[str] = []

    def add(self, delta: Row) -> None:
        """Adds a delta."""
        kind = delta.get("type")
        if kind == "input_json_delta":
            self._input.append(str(delta.get("partial_json") or ""))
        elif isinstance(kind, str) and kind in _BLOCK_PIECES:
            key = _BLOCK_PIECES[kind]
            self._pieces.setdefault(key, [str(self._block.get(key) or "")]).append(
                str(delta.get(key) or "")
            )

    def assemble(self) -> Row:
        """Returns the block; arguments that are not JSON, such as truncated ones, stay text."""
        block = self._block | {key: "".join(pieces) for key, pieces in self._pieces.items()}
        arguments = "".join(self._input)
        if arguments:
            try:
                block["input"] = msgspec.json.decode(arguments)
            except (ValueError, RecursionError):
                block["input"] = arguments
        return block

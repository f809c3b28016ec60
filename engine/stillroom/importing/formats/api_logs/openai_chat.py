"""Logs of OpenAI's chat completions: rows with a request's messages and what came back.

The request and the response may stand in fields of their own, the messages beside the reply, or the
messages in the `chat.completion` object itself. A streamed reply may be a list of its chunks.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stillroom.data.layouts.foreign import numbers_by_name
from stillroom.importing.bodies.envelopes import (
    LoggedPair,
    calls_of_pair,
    find_pair,
    is_of_another_tool,
)
from stillroom.importing.bodies.exchanges import NO_REQUEST
from stillroom.importing.bodies.facts import as_list, as_row
from stillroom.importing.json_rows import JsonRow, Row, UnreadableRowError, convert_rows, head_rows
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat

_REPLIES = ("output", "reply")
_SCORES = ("score", "rating", "reward", "feedback")


def _is_recognised(_path: Path, head: bytes) -> bool:
    return any(_is_call(row) for row in head_rows(head))


def _is_call(row: Row) -> bool:
    pair = None if is_of_another_tool(row) else _pair_of(row)
    return pair is not None and pair.api == "chat" and "messages" in pair.request


def _pair_of(row: Row) -> LoggedPair | None:
    if "choices" in row:
        request = as_row(row.get("request")) or as_row(row.get("input")) or row
        return LoggedPair(request, row, row) if "messages" in request else None
    name = next((name for name in _REPLIES if row.get(name)), None)
    if name is not None and isinstance(row.get("messages"), list):
        return LoggedPair(row, row[name], row)
    return find_pair(row)


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    return convert_rows(paths, _calls)


def _calls(row: JsonRow) -> Iterator[LoggedConversation]:
    pair = _pair_of(row.data)
    if pair is None:
        raise UnreadableRowError(NO_REQUEST, "the row has no `request` and no `messages`")
    whole = LoggedPair(pair.request, _whole_reply(pair.response), pair.envelope, pair.path)
    scores = _scores(row.data)
    for call in calls_of_pair(row, whole, None):
        call.scores.update(scores)
        yield call


def _scores(row: Row) -> dict[str, float]:
    """Returns the judgements beside a call: `scores` by name, or one under a usual name."""
    single = {name: row[name] for name in _SCORES if name in row}
    single = {name: float(v) if isinstance(v, bool) else v for name, v in single.items()}
    return numbers_by_name(as_row(row.get("scores"))) | numbers_by_name(single)


def _whole_reply(response: Any) -> Any:
    """Returns the completion that a list of streamed chunks adds up to; others unchanged."""
    chunks = [as_row(chunk) for chunk in as_list(response)]
    if not any(isinstance(chunk.get("choices"), list) for chunk in chunks):
        return response
    choices: dict[int, _StreamedChoice] = {}
    whole: Row = {}
    for chunk in chunks:
        whole |= {key: value for key, value in chunk.items() if value is not None}
        for choice in map(as_row, as_list(chunk.get("choices"))):
            index = choice.get("index") if isinstance(choice.get("index"), int) else 0
            choices.setdefault(index or 0, _StreamedChoice()).add(choice)
    return whole | {"choices": [choices[index].whole() for index in sorted(choices)]}


class _StreamedChoice:
    """Adds up the pieces of one choice of a streamed reply."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._calls: dict[int, Row] = {}
        self._finish_reason: Any = None

    def add(self, choice: Row) -> None:
        """Adds the piece in one chunk."""
        delta = as_row(choice.get("delta"))
        for key, value in delta.items():
            if isinstance(value, str) and key != "role":
                self._texts[key] = self._texts.get(key, "") + value
        for call in map(as_row, as_list(delta.get("tool_calls"))):
            index = call.get("index") if isinstance(call.get("index"), int) else 0
            known = self._calls.setdefault(index or 0, {"function": {"name": "", "arguments": ""}})
            if call.get("id"):
                known["id"] = call["id"]
            for key in ("name", "arguments"):
                piece = as_row(call.get("function")).get(key)
                known["function"][key] += piece if isinstance(piece, str) else ""
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def whole(self) -> Row:
        """Returns the choice as an unstreamed reply has it."""
        message: Row = {"role": "assistant", "content": None, **self._texts}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return {"message": message, "finish_reason": self._finish_reason}


OPENAI_CHAT = TraceFormat(
    name="openai_chat",
    title="OpenAI chat completions: requests and responses",
    is_recognised=_is_recognised,
    read=_read,
)

"""Logs of OpenAI's chat completions: rows with a request's messages and what came back.

The request and the response may stand in fields of their own, the messages beside the reply, or the
messages in the `chat.completion` object itself. A streamed reply may be a list of its chunks.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stillroom.data.layouts.foreign import numbers_by_name
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    convert_rows,
    has_row,
)
from stillroom.importing.payloads.calls import NO_REQUEST
from stillroom.importing.payloads.fields import as_list, as_row
from stillroom.importing.payloads.pairs import (
    LoggedPair,
    calls_of_pair,
    find_pair,
    is_of_another_tool,
)
from stillroom.importing.payloads.streams import whole_completion
from stillroom.importing.records import (
    LoggedConversation,
    SourceRow,
    TraceFormat,
)

_REPLIES = ("output", "reply")
_SCORES = ("score", "rating", "reward", "feedback")


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
    return whole_completion(chunks, is_complete=False)


OPENAI_CHAT = TraceFormat(
    name="openai_chat",
    title="OpenAI chat completions: requests and responses",
    is_recognised=has_row(_is_call),
    read=_read,
)

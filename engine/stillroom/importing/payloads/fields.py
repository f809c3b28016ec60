"""Reads the fields of a logged call other than its messages: tokens, times, how it ended."""

import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, cast

import msgspec

from stillroom.data.checks import as_number
from stillroom.types import Usage

_PROMPT_KEYS = ("prompt_tokens", "input_tokens", "promptTokens", "inputTokens")
_COMPLETION_KEYS = ("completion_tokens", "output_tokens", "completionTokens", "outputTokens")
_ANTHROPIC_CACHE = ("cache_read_input_tokens", "cache_creation_input_tokens")
_DETAILS = {
    "cached_tokens": "cache_read_tokens",
    "cache_read": "cache_read_tokens",
    "cache_creation": "cache_write_tokens",
    "reasoning_tokens": "reasoning_tokens",
    "reasoning": "reasoning_tokens",
}
_ID_NAME = re.compile(r"(?:^|[^A-Za-z])(?:uu|gu)?id$|[a-z](?:Id|ID|Uuid|UUID)$", re.ASCII)
_LONGEST_ANSWER = 60
"""The most characters of an answer that is matched; a longer target is a model's solution, or says
how to judge."""
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "completed": "stop",
    "eos": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "tool_call": "tool_calls",
    "function_call": "tool_calls",
    "refusal": "content_filter",
    "safety": "content_filter",
}


def usage_of(value: Any) -> Usage | None:
    """Returns the tokens of a call from its usage object; None if it names none.

    Anthropic counts the tokens read from and written to a cache apart from those of the input, all
    others count them among those of the prompt.
    """
    fields = as_row(value)
    prompt, completion = _first_count(fields, _PROMPT_KEYS), _first_count(fields, _COMPLETION_KEYS)
    if prompt is None and completion is None:
        return None
    if "input_tokens" in fields:
        prompt = (prompt or 0) + sum(_first_count(fields, (key,)) or 0 for key in _ANTHROPIC_CACHE)
    return Usage(prompt_tokens=prompt or 0, completion_tokens=completion or 0)


def usage_details(value: Any) -> dict[str, int]:
    """Returns how many of a call's tokens were read from a cache, written to one, or reasoning."""
    fields = as_row(value)
    details: dict[str, int] = {}
    for source, ours in (
        ("cache_read_input_tokens", "cache_read_tokens"),
        ("cache_creation_input_tokens", "cache_write_tokens"),
    ):
        if count := _first_count(fields, (source,)):
            details[ours] = count
    for name, nested in fields.items():
        if not name.endswith(("_details", "Details")):
            continue
        for source, ours in _DETAILS.items():
            if count := _first_count(as_row(nested), (source,)):
                details[ours] = count
    return details


def short_answer(value: Any) -> str | None:
    """Returns the answer of a task's author, if it is short enough to be found in a reply."""
    text = value.strip() if isinstance(value, str) else ""
    return text if 0 < len(text) <= _LONGEST_ANSWER and "\n" not in text else None


def finish_reason_of(value: Any) -> str | None:
    """Returns why a reply ended, in the words of chat completions; other words stay as they are."""
    if not isinstance(value, str) or not value:
        return None
    return _FINISH_REASONS.get(value.lower(), value.lower())


def iso_time(value: Any) -> str | None:
    """Returns a time in ISO 8601 and UTC; None if the value is no time.

    Numbers are seconds, milliseconds, microseconds or nanoseconds since 1970, as their size says.
    Texts without a time zone are in UTC, as the logs that write such say of themselves.
    """
    moment = _moment(value)
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def iso_seconds(value: Any) -> float | None:
    """Returns the seconds from 1970 to a time, as iso_time reads it; None if it is none."""
    moment = _moment(value)
    return None if moment is None else moment.timestamp()


def seconds_between(begin: Any, end: Any) -> float | None:
    """Returns the seconds from one time to a later one; None if one is unknown or it is earlier."""
    first, last = _moment(begin), _moment(end)
    if first is None or last is None or last < first:
        return None
    return (last - first).total_seconds()


def positive_number(value: Any) -> float | None:
    """Returns a finite number that is not negative; None for anything else."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) and number >= 0 else None


def decimal_number(value: Any) -> float | None:
    """Returns a number that may be written as text; None if it is not a finite one."""
    if isinstance(value, str | Decimal):
        try:
            value = float(value)
        except (ValueError, OverflowError):
            return None
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def text_of(value: Any) -> str | None:
    """Returns a text that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None


def first_text(row: Mapping[str, Any], *names: str) -> str | None:
    """Returns the first of some fields that is a text and not empty; None if there is none."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def as_row(value: Any) -> dict[str, Any]:
    """Returns the value if it is an object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Returns the value if it is a list, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def leaves(value: Any, start: str = "", levels: int = 3) -> Iterator[tuple[str, str]]:
    """Yields the texts and whole numbers in an object and in those within it, by their path."""
    for name, item in as_row(value).items():
        if levels and isinstance(item, dict):
            yield from leaves(item, f"{start}{name}.", levels - 1)
        elif isinstance(item, str | int) and not isinstance(item, bool):
            yield f"{start}{name}", str(item)


@lru_cache(1024)
def is_id_name(path: str) -> bool:
    """Returns whether a field holds an id by its name, such as `response_id` or `traceId`."""
    return _ID_NAME.search(path) is not None


def parsed(value: Any) -> Any:
    """Returns what a JSON text holds, if it is an object or a list; any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return value


def without_nothing(**facts: Any) -> dict[str, Any]:
    """Returns the facts that are known: neither None, nor an empty text, list or object."""
    return {name: fact for name, fact in facts.items() if fact not in (None, "", [], {}, ())}


def _first_count(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        number = decimal_number(fields.get(name))
        if number is not None and number >= 0:
            return int(number)
    return None


def _moment(value: Any) -> datetime | None:
    number = decimal_number(value)
    if number is None and isinstance(value, str | datetime):
        try:
            moment = datetime.fromisoformat(value) if isinstance(value, str) else value
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            return None
    if number is None or number <= 0:
        return None
    seconds = number
    while seconds > 1e11:
        seconds /= 1000
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=round(seconds * 1e6))
    except OverflowError:
        return None

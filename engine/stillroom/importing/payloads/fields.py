"""Reads the fields of a logged call other than its messages: usage, times, finish reason."""

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
_MAX_ANSWER_LENGTH = 60
"""The maximum length of an answer for matching; a longer target is a reference solution or grading
instructions."""
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
    """Returns the token counts in an API's usage object; None if there are none.

    Anthropic counts cached tokens separately from input tokens; the other APIs include them in the
    prompt tokens.
    """
    fields = as_row(value)
    prompt, completion = _first_count(fields, _PROMPT_KEYS), _first_count(fields, _COMPLETION_KEYS)
    if prompt is None and completion is None:
        return None
    if "input_tokens" in fields:
        prompt = (prompt or 0) + sum(_first_count(fields, (key,)) or 0 for key in _ANTHROPIC_CACHE)
    return Usage(prompt_tokens=prompt or 0, completion_tokens=completion or 0)


def usage_details(value: Any) -> dict[str, int]:
    """Returns the numbers of cache-read, cache-write and reasoning tokens in a usage object."""
    fields = as_row(value)
    details: dict[str, int] = {}
    for source, name in (
        ("cache_read_input_tokens", "cache_read_tokens"),
        ("cache_creation_input_tokens", "cache_write_tokens"),
    ):
        if count := _first_count(fields, (source,)):
            details[name] = count
    for field, nested in fields.items():
        if not field.endswith(("_details", "Details")):
            continue
        for source, name in _DETAILS.items():
            if count := _first_count(as_row(nested), (source,)):
                details[name] = count
    return details


def short_answer(value: Any) -> str | None:
    """Returns a reference answer if it is short enough to be matched in a reply, else None."""
    text = value.strip() if isinstance(value, str) else ""
    return text if 0 < len(text) <= _MAX_ANSWER_LENGTH and "\n" not in text else None


def finish_reason_of(value: Any) -> str | None:
    """Converts a finish reason to that of chat completions; only lowercases an unknown one."""
    if not isinstance(value, str) or not value:
        return None
    return _FINISH_REASONS.get(value.lower(), value.lower())


def iso_time(value: Any) -> str | None:
    """Returns a time in ISO 8601 and UTC; None if the value is not a time.

    A number is in seconds, milliseconds, microseconds or nanoseconds since 1970, depending on its
    size. A string without a time zone is in UTC, as documented for the logs that write these.
    """
    moment = _parse_time(value)
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def iso_seconds(value: Any) -> float | None:
    """Returns a time in seconds since 1970, parsed as by `iso_time`; None if it is not a time."""
    moment = _parse_time(value)
    return None if moment is None else moment.timestamp()


def seconds_between(begin: Any, end: Any) -> float | None:
    """Returns the seconds between two times; None if one is unknown or they are out of order."""
    first, last = _parse_time(begin), _parse_time(end)
    if first is None or last is None or last < first:
        return None
    return (last - first).total_seconds()


def non_negative_number(value: Any) -> float | None:
    """Returns the value if it is a finite, non-negative number, else None."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) and number >= 0 else None


def decimal_number(value: Any) -> float | None:
    """Returns the value as a finite number, parsed if it is text; None if it is not a number."""
    if isinstance(value, str | Decimal):
        try:
            value = float(value)
        except (ValueError, OverflowError):
            return None
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def text_of(value: Any) -> str | None:
    """Returns the value if it is a non-empty string, else None."""
    return value if isinstance(value, str) and value else None


def first_text(row: Mapping[str, Any], *names: str) -> str | None:
    """Returns the first of the named fields that is a non-empty string; None if there is none."""
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


def leaves(value: Any, prefix: str = "", levels: int = 3) -> Iterator[tuple[str, str]]:
    """Yields the strings and integers in nested objects, each with its dotted path."""
    for name, item in as_row(value).items():
        if levels and isinstance(item, dict):
            yield from leaves(item, f"{prefix}{name}.", levels - 1)
        elif isinstance(item, str | int) and not isinstance(item, bool):
            yield f"{prefix}{name}", str(item)


@lru_cache(1024)
def is_id_name(path: str) -> bool:
    """Returns whether a field's name is that of an id, such as `response_id` or `traceId`."""
    return _ID_NAME.search(path) is not None


def parse_if_json(value: Any) -> Any:
    """Parses a string that is a JSON object or list; returns any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return value


def without_empty(**values: Any) -> dict[str, Any]:
    """Returns the keyword arguments that are neither None nor empty."""
    return {name: value for name, value in values.items() if value not in (None, "", [], {}, ())}


def _first_count(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Returns the first of the named fields that is a count; None if there is none."""
    for name in names:
        number = decimal_number(fields.get(name))
        if number is not None and number >= 0:
            return int(number)
    return None


def _parse_time(value: Any) -> datetime | None:
    """Returns a time in UTC, parsed as `iso_time` describes; None if it is not a time."""
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

"""Formatting for the report: numbers, times, names and long texts."""

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from stillroom.errors import noun_for
from stillroom.evaluate.intervals import Estimate
from stillroom.run_folder import RemoteView
from stillroom.types import RunKind

NO_VALUE = "–"
"""The text for a missing value."""

_RUN_ID = re.compile(rf"\b((?:{'|'.join(RunKind)})-[a-z2-9]{{6}})[a-z2-9]{{20}}\b")
_LONGEST_NAME = 44
_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate as text: the value, and its 95 % interval if it has one."""

    value: str
    range: str | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the large figures at the top of a page."""

    label: str
    value: str
    note: str


def number(value: float) -> str:
    """Returns a number with three significant digits, or without decimals from 1,000 on."""
    if not math.isfinite(value):
        return NO_VALUE
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    return text.replace(",", _SPACE).replace("-", "\N{MINUS SIGN}")


def count(value: int) -> str:
    """Returns a whole number in groups of three digits."""
    return f"{value:,}".replace(",", _SPACE)


def plural(value: int, noun: str) -> str:
    """Returns e.g. `1 run` or `3 runs`."""
    return f"{count(value)}{_SPACE}{noun_for(value, noun)}"


def percent(share: float) -> str:
    """Returns a share as a percentage with one decimal."""
    return f"{_decimal(100 * share)}{_SPACE}%"


def points(share: float, *, is_signed: bool) -> str:
    """Returns a difference of shares in percentage points; `is_signed` adds a plus sign."""
    return ("+" if is_signed and share > 0 else "") + _decimal(100 * share)


def percent_interval(estimate: Estimate) -> Interval:
    """Returns an accuracy and its interval, both in percent."""
    if estimate.low is None or estimate.high is None:
        return Interval(percent(estimate.value), None)
    low, high = _decimal(100 * estimate.low), _decimal(100 * estimate.high)
    return Interval(percent(estimate.value), f"{low}–{high}")


def interval_text(difference: Estimate) -> str:
    """Returns the interval of a difference of shares in percentage points."""
    if difference.low is None or difference.high is None:
        return "no interval"
    is_signed = difference.low < 0
    low, high = (points(end, is_signed=is_signed) for end in (difference.low, difference.high))
    return f"95 % interval {low} to {high}"


def number_interval(estimate: Estimate) -> Interval:
    """Returns an estimate and its interval as plain numbers."""
    if estimate.low is None or estimate.high is None:
        return Interval(number(estimate.value), None)
    # "to" instead of a dash, since low may be negative.
    return Interval(number(estimate.value), f"{number(estimate.low)} to {number(estimate.high)}")


def moment(text: str) -> str:
    """Returns an ISO 8601 time in a readable form; any other text is returned unchanged."""
    try:
        time = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return text
    return f"{time.day} {time:%b %Y, %H:%M} UTC"


def machine_status(view: RemoteView) -> str:
    """Returns the machine of a run, its phase, and the time of the last contact."""
    text = f"on {view.where}"
    if view.phase == "over":
        return text
    if view.phase != "running":
        text += f", {view.phase.replace('_', ' ')}"
    if view.last_contact is None:
        return f"{text}, not connected yet"
    return f"{text}, last contact {moment(view.last_contact)}"


def duration(seconds: float) -> str:
    """Returns a number of seconds as text, in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f}{_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{_SPACE}min {rest}{_SPACE}s"
    hours, minutes = divmod(minutes, 60)
    return f"{count(hours)}{_SPACE}h {minutes}{_SPACE}min"


def short_name(name: str) -> str:
    """Returns a name for a label, with run ids shortened to a prefix that still finds the run."""
    name = short_ids(name)
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def short_ids(path: str) -> str:
    """Returns a path or text for display, with only its run ids shortened."""
    return _RUN_ID.sub(r"\1", path)


def _decimal(value: float) -> str:
    text = f"{value:.1f}".replace("-", "\N{MINUS SIGN}")
    return "0.0" if text == "\N{MINUS SIGN}0.0" else text

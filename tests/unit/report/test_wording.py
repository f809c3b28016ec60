"""Numbers, times and names are written for people."""

import pytest

from stillroom.evaluate.intervals import Estimate
from stillroom.report.wording import (
    Interval,
    duration,
    moment,
    number,
    percent_interval,
    points,
)
from stillroom.types import dollars

SPACE = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0, "$0.00"),
        (0.0000213, "$0.0000213"),
        (0.0214, "$0.0214"),
        (0.3, "$0.30"),
        (0.99961, "$1.00"),
        (1234.5, "$1,234.50"),
    ],
)
def test_dollars_have_cents_and_below_one_as_many_digits_as_say_something(
    usd: float, text: str
) -> None:
    assert dollars(usd) == text


def test_what_is_not_known_is_left_open() -> None:
    lone = Estimate(value=1.0, low=None, high=None, n=1)
    assert percent_interval(lone) == Interval(f"100.0{SPACE}%", None)
    assert number(float("nan")) == "–"


def test_differences_carry_their_sign_and_zero_has_none() -> None:
    assert points(0.366, is_signed=True) == "+36.6"
    assert points(-0.02, is_signed=True) == f"{MINUS}2.0"
    assert points(-0.0001, is_signed=True) == "0.0"


def test_times_and_durations_are_readable_and_never_fail() -> None:
    assert moment("2026-11-20T10:33:14.660Z") == "20 Nov 2026, 10:33 UTC"
    assert moment("yesterday") == "yesterday"
    assert duration(7.6) == f"7.6{SPACE}s"
    assert duration(7510) == f"2{SPACE}h 5{SPACE}min"

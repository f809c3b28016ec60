"""Numbers, times and names are written for people."""

from stillroom.evaluate.intervals import Estimate
from stillroom.report.wording import (
    Interval,
    duration,
    moment,
    number,
    percent_interval,
    points,
    short_name,
)

SPACE = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"
SUFFIX = "abcdefghijkmnpqrstuvwxyz23"


def test_numbers_have_three_digits_and_large_ones_groups() -> None:
    assert number(0.030874) == "0.0309"
    assert number(-2.5) == f"{MINUS}2.5"
    assert number(205_320) == f"205{SPACE}320"
    assert number(float("nan")) == "–"


def test_estimates_are_percentages_with_their_interval() -> None:
    whole = Estimate(value=0.89, low=0.8495, high=0.9206, n=300)
    assert percent_interval(whole) == Interval(f"89.0{SPACE}%", "85.0–92.1")
    lone = Estimate(value=1.0, low=None, high=None, n=1)
    assert percent_interval(lone) == Interval(f"100.0{SPACE}%", None)


def test_differences_carry_their_sign_and_zero_has_none() -> None:
    assert points(0.366, is_signed=True) == "+36.6"
    assert points(-0.02, is_signed=True) == f"{MINUS}2.0"
    assert points(-0.0001, is_signed=True) == "0.0"


def test_times_and_durations_are_readable_and_never_fail() -> None:
    assert moment("2026-11-20T10:33:14.660Z") == "20 Nov 2026, 10:33 UTC"
    assert moment("yesterday") == "yesterday"
    assert duration("2026-11-20T10:00:00Z", "2026-11-20T10:00:07.600Z") == f"7.6{SPACE}s"
    long = duration("2026-11-20T10:00:00Z", "2026-11-20T12:05:10Z")
    assert long == f"2{SPACE}h 5{SPACE}min"
    assert duration("2026-11-20T10:00:00Z", None) is None


def test_run_ids_become_beginnings_that_still_find_the_run() -> None:
    assert short_name(f"distill-{SUFFIX}") == "distill-abcdef"
    assert short_name(f"runs/sft-{SUFFIX}/checkpoints") == "runs/sft-abcdef/checkpoints"
    assert short_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert len(short_name("x" * 99)) < 50

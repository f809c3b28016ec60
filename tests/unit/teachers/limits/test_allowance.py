from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.teachers.limits.allowance import Allowance, AllowancePace, allowances
from stillroom.teachers.limits.limit_types import LimitUnit, SentRequest

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def openai_headers(reset: str) -> dict[str, str]:
    return {
        "x-ratelimit-limit-tokens": "30000",
        "x-ratelimit-remaining-tokens": "29000",
        "x-ratelimit-reset-tokens": reset,
    }


@pytest.mark.parametrize(
    ("reset", "seconds"),
    [("2s", 2.0), ("20ms", 0.02), ("6m0s", 360.0), ("1h2m3.5s", 3723.5), ("1m30ms", 60.03),
     ("2m59.56s", 179.56), ("0.25", 0.25), ("7", 7.0), ("1d", 86400.0)],
)  # fmt: skip
def test_what_is_left_is_read_as_it_is_written(reset: str, seconds: float) -> None:
    reported = allowances(openai_headers(reset), NOW)
    assert reported == {LimitUnit.TOKENS: Allowance(30000.0, 29000.0, pytest.approx(seconds))}


def test_a_moment_is_as_good_as_a_span_of_time() -> None:
    headers = {
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-remaining": "49",
        "anthropic-ratelimit-requests-reset": "2026-01-02T03:04:06.500Z",
    }
    assert allowances(headers, NOW) == {LimitUnit.REQUESTS: Allowance(50.0, 49.0, 1.5)}


@pytest.mark.parametrize(
    "reset", ["", "soon", "1 minute", "12:00", "1.2.3s", "..s", ".ms", "nan", "inf", "1754006400"]
)
def test_what_cannot_be_read_says_nothing(reset: str) -> None:
    assert allowances(openai_headers(reset), NOW) == {}


@pytest.mark.parametrize(
    ("limit", "remaining"), [("nan", "1"), ("inf", "1"), ("10", "nan"), ("10", "-1"), ("10", "11")]
)
def test_what_cannot_be_a_limit_says_nothing(limit: str, remaining: str) -> None:
    headers = {
        "x-ratelimit-limit-tokens": limit,
        "x-ratelimit-remaining-tokens": remaining,
        "x-ratelimit-reset-tokens": "2s",
    }
    assert allowances(headers, NOW) == {}


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{0,4}[dhms]{0,2}[0-9.]{0,4}[ms]{0,2}"))
def test_headers_of_any_shape_are_no_error(reset: str) -> None:
    for reported in allowances(openai_headers(reset), NOW).values():
        assert 0 < reported.reset_s <= 2 * 86_400


def test_what_is_told_in_part_says_nothing() -> None:
    assert allowances({"x-ratelimit-remaining-requests": "3"}, NOW) == {}


def follow(follower: AllowancePace, reported: list[tuple[float, float, float]]) -> None:
    for index, (at, remaining, reset_s) in enumerate(reported):
        sent = SentRequest(number=10 * index + 1, at=at, in_flight=1, fills_window=False)
        allowance = Allowance(100.0, remaining, reset_s)
        follower.update(allowance, sent, sent.number, LimitUnit.REQUESTS, at)


def test_a_bucket_that_refills_steadily_is_believed_and_only_when_little_is_left() -> None:
    follower = AllowancePace()
    follow(follower, [(0.3 * i, 100 - 10 * i, i) for i in range(1, 8)])
    assert follower.pace is None
    follow(follower, [(3.0, 5, 9.5)])
    assert follower.pace is not None
    assert follower.pace < 10


def test_a_limit_that_starts_anew_each_minute_is_not_taken_for_a_bucket() -> None:
    follower = AllowancePace()
    follow(follower, [(0.3 * i, 100 - 11 * i, 60 - 0.3 * i) for i in range(1, 10)])
    assert follower.pace is None

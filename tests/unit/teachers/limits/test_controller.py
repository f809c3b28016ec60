import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.limited_endpoint import Bucket, Simulated, simulate
from stillroom.teachers.limits.allowance import Allowance
from stillroom.teachers.limits.limit_types import LimitKind, LimitSettings, LimitUnit
from stillroom.teachers.limits.limiter import LimitController

SETTINGS = LimitSettings(initial_in_flight=20, max_in_flight=256)
STEADY = ((0.0, 200.0),)


def share_used(bucket: Bucket, result: Simulated, seconds: float) -> float:
    bucket.take(seconds, 0)
    return result.accepted_cost / bucket.offered


def share_refused(result: Simulated) -> float:
    return result.refused / (result.accepted + result.refused)


def some_tokens(rng: random.Random) -> float:
    return rng.choice((80.0, 160.0, 240.0, 320.0))


@pytest.mark.parametrize("lateness_s", [0.0, 0.002])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_a_rate_limit_is_used_and_hardly_ever_overstepped(sigma: float, lateness_s: float) -> None:
    bucket = Bucket(STEADY, burst=20)
    result = simulate(SETTINGS, seconds=40, bucket=bucket, sigma=sigma, lateness_s=lateness_s)
    assert share_used(bucket, result, 40) >= 0.98
    assert share_refused(result) <= 0.01


def test_answers_that_take_long_do_not_make_a_rate_limit_less_used() -> None:
    bucket = Bucket(STEADY, burst=20)
    result = simulate(SETTINGS, seconds=40, bucket=bucket, latency_s=0.5, refusal_s=0.1, sigma=0.5)
    assert share_used(bucket, result, 40) >= 0.93
    assert share_refused(result) <= 0.015


@pytest.mark.parametrize("kind", [LimitKind.UNKNOWN, LimitKind.TOKENS])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_a_limit_on_tokens_is_found_out_and_kept(sigma: float, kind: LimitKind) -> None:
    bucket = Bucket(((0.0, 40_000.0),), burst=4000)
    controller = LimitController(SETTINGS)
    result = simulate(
        SETTINGS, seconds=40, bucket=bucket, sigma=sigma, cost=some_tokens, kind=kind,
        controller=controller,
    )  # fmt: skip
    assert share_used(bucket, result, 40) >= 0.95
    assert share_refused(result) <= 0.01
    assert controller.unit is LimitUnit.TOKENS


@pytest.mark.parametrize(
    "schedule",
    [((0, 200), (13, 100), (26, 300)), ((0, 300), (13, 100), (26, 200))],
)
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_a_limit_that_moves_is_followed(schedule: tuple, sigma: float) -> None:
    bucket = Bucket(schedule, burst=20)
    result = simulate(SETTINGS, seconds=40, bucket=bucket, sigma=sigma, lateness_s=0.002)
    assert share_used(bucket, result, 40) >= 0.94
    assert share_refused(result) <= 0.01


@pytest.mark.thorough
@pytest.mark.parametrize(("at_once", "latency_s"), [(50, 0.05), (20, 0.1), (20, 0.5)])
def test_a_limit_on_how_many_at_once_is_used_and_kept(at_once: int, latency_s: float) -> None:
    result = simulate(SETTINGS, seconds=60, most_at_once=at_once, latency_s=latency_s, sigma=0.5)
    assert result.busy / (60 * at_once) >= 0.97
    assert share_refused(result) <= 0.01


def test_where_all_answers_take_equally_long_a_limit_on_how_many_at_once_is_kept_as_a_rate() -> (
    None
):
    result = simulate(SETTINGS, seconds=60, most_at_once=20, latency_s=0.1)
    assert result.busy / (60 * 20) >= 0.85
    assert share_refused(result) <= 0.01


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tells", "rate", "burst", "latency_s"),
    [
        (LimitUnit.REQUESTS, 200.0, 20.0, 0.05),
        (LimitUnit.TOKENS, 40_000.0, 4000.0, 0.05),
        (LimitUnit.TOKENS, 4000.0, 240_000.0, 0.5),
    ],
)
def test_what_an_endpoint_says_is_left_is_used_up_without_being_refused(
    tells: LimitUnit, rate: float, burst: float, latency_s: float
) -> None:
    bucket = Bucket(((0.0, rate),), burst=burst)
    cost = some_tokens if tells is LimitUnit.TOKENS else lambda _rng: 1.0
    result = simulate(
        SETTINGS, seconds=120, bucket=bucket, latency_s=latency_s, sigma=0.5, lateness_s=0.002,
        tells=tells, cost=cost,
    )  # fmt: skip
    assert share_used(bucket, result, 120) >= 0.97
    assert share_refused(result) <= 0.005


def test_an_endpoint_whose_word_is_wrong_is_no_longer_believed() -> None:
    bucket = Bucket(STEADY, burst=20)
    result = simulate(
        SETTINGS, seconds=40, bucket=bucket, sigma=0.5, tells=LimitUnit.REQUESTS, told_times=3.0
    )
    assert share_used(bucket, result, 40) >= 0.9
    assert share_refused(result) <= 0.02


def test_an_endpoint_that_says_it_counts_calls_is_believed() -> None:
    controller = LimitController(SETTINGS)
    sent = [controller.record_sent(0.0) for _ in range(20)]
    for one in sent[:8]:
        controller.record_accepted(one, 0.05)
    controller.record_refused(sent[8], 0.05, LimitKind.CONCURRENCY)
    assert controller.window == 8
    assert controller.pace is None


def test_without_a_limit_the_number_in_flight_doubles_up_to_what_is_allowed() -> None:
    result = simulate(SETTINGS, seconds=2)
    assert result.most_in_flight == 256
    assert result.refused == 0
    assert result.accepted >= 0.85 * 256 * 2 / 0.05


def test_growth_counts_only_while_the_window_is_used() -> None:
    result = simulate(SETTINGS, seconds=2, num_clients=9)
    assert result.most_in_flight == 9
    controller = LimitController(SETTINGS)
    for second in range(100):
        controller.record_accepted(controller.record_sent(second), second + 0.5)
    assert controller.window == 20


def test_a_cut_answers_all_that_were_on_their_way() -> None:
    controller = LimitController(SETTINGS)
    first = [controller.record_sent(0.0) for _ in range(20)]
    for one in first[:10]:
        controller.record_accepted(one, 0.05)
    controller.record_refused(first[10], 0.05)
    pace = controller.pace
    for one in first[11:]:
        controller.record_refused(one, 0.06)
    assert controller.pace == pace
    assert controller.in_flight == 0


def test_calls_that_fail_teach_nothing() -> None:
    controller = LimitController(SETTINGS)
    for _ in range(50):
        controller.record_failed(controller.record_sent(0.0))
    assert (controller.in_flight, controller.window, controller.pace) == (0, 20, None)


def test_refusals_before_any_answer_make_the_window_smaller() -> None:
    controller = LimitController(SETTINGS)
    sent = [controller.record_sent(0.0) for _ in range(20)]
    controller.record_refused(sent[0], 0.002)
    assert controller.pace is None
    assert 1 <= controller.window <= 10
    assert controller.ready_at(0.01) == math.inf


def test_while_everything_is_refused_the_next_try_is_never_far_away() -> None:
    controller, now = LimitController(SETTINGS), 0.0
    for _ in range(20):
        controller.record_accepted(controller.record_sent(now), now + 0.1)
        now += 0.1
    for _ in range(200):
        now = max(now, controller.ready_at(now))
        controller.record_refused(controller.record_sent(now), now + 0.01)
        assert controller.ready_at(now) <= now + 2.0


ANSWERS = st.tuples(
    st.sampled_from(["accepted", "refused", "failed"]),
    st.sampled_from(LimitKind),
    st.sampled_from(LimitUnit),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e4),
    st.floats(1e-6, 2e5),
    st.floats(1e-4, 100.0),
    st.floats(1.0, 1e6),
)


@given(st.lists(ANSWERS, min_size=1, max_size=60))
def test_whatever_an_endpoint_answers_and_tells_the_next_call_is_at_most_a_minute_away(
    answers: list[tuple[str, LimitKind, LimitUnit, float, float, float, float, float]],
) -> None:
    controller, now = LimitController(SETTINGS), 0.0
    for answer, kind, unit, limit, used, reset_s, trip_s, tokens in answers:
        ready_at = controller.ready_at(now, tokens)
        assert now <= ready_at <= now + 60.0
        now = ready_at
        sent = controller.record_sent(now, tokens)
        now += trip_s
        controller.record_allowance(
            sent, now, unit, Allowance(limit, max(0.0, limit - used), reset_s)
        )
        if answer == "accepted":
            controller.record_accepted(sent, now)
        elif answer == "refused":
            controller.record_refused(sent, now, kind)
        else:
            controller.record_failed(sent)
    assert controller.in_flight == 0


def test_a_limit_that_is_told_as_hardly_anything_stops_no_run() -> None:
    controller, now = LimitController(SETTINGS), 0.0
    for _ in range(8):
        now = max(now + 0.3, controller.ready_at(now))
        sent = controller.record_sent(now)
        controller.record_allowance(sent, now, LimitUnit.REQUESTS, Allowance(60.0, 0.0, 86_400.0))
        controller.record_accepted(sent, now)
    assert controller.ready_at(now) <= now + 60.0

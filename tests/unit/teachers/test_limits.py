import math

import pytest

from fakes.limited_endpoint import Bucket, Simulated, simulate
from stillroom.teachers.limits import LimitController, LimitKind, LimitSettings

SETTINGS = LimitSettings(start=20, most=256)
STEADY = ((0.0, 200.0),)


def share_used(bucket: Bucket, result: Simulated, seconds: float) -> float:
    bucket.take(seconds, 0)
    return result.accepted_cost / bucket.offered


def share_refused(result: Simulated) -> float:
    return result.refused / (result.accepted + result.refused)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sigma": 0.6},
        {"seed": 7, "sigma": 0.3, "refusal_s": 0.01},
        {"cost": lambda rng: rng.choice((0.4, 0.8, 1.2, 1.6))},
    ],
    ids=["fixed latency", "varying latency", "slow refusals", "limited by tokens"],
)
def test_a_rate_limit_is_used_and_hardly_ever_overstepped(more: dict) -> None:
    bucket = Bucket(STEADY, burst=20)
    result = simulate(SETTINGS, seconds=40, bucket=bucket, **more)
    assert share_used(bucket, result, 40) >= 0.93
    assert share_refused(result) <= 0.01


@pytest.mark.parametrize(
    "schedule",
    [((0, 200), (13, 100), (26, 300)), ((0, 300), (13, 100), (26, 200))],
)
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_a_limit_that_moves_is_followed(schedule: tuple, sigma: float) -> None:
    bucket = Bucket(schedule, burst=20)
    result = simulate(SETTINGS, seconds=40, bucket=bucket, sigma=sigma)
    assert share_used(bucket, result, 40) >= 0.93
    assert share_refused(result) <= 0.01


@pytest.mark.parametrize("sigma", [0.0, 0.6])
@pytest.mark.parametrize(("at_once", "latency_s"), [(50, 0.05), (20, 0.5)])
def test_a_limit_on_how_many_at_once_is_used_and_kept(
    at_once: int, latency_s: float, sigma: float
) -> None:
    result = simulate(SETTINGS, seconds=60, most_at_once=at_once, latency_s=latency_s, sigma=sigma)
    assert result.busy / (60 * at_once) >= 0.9
    assert share_refused(result) <= 0.02


def test_an_endpoint_that_says_it_counts_calls_is_believed() -> None:
    controller = LimitController(SETTINGS)
    sent = [controller.send(0.0) for _ in range(20)]
    for one in sent[:8]:
        controller.accepted(one, 0.05)
    controller.refused(sent[8], 0.05, LimitKind.CONCURRENCY)
    assert controller.window == 8
    assert controller.pace == math.inf


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
        controller.accepted(controller.send(second), second + 0.5)
    assert controller.window == 20


def test_a_cut_answers_all_that_were_on_their_way() -> None:
    controller = LimitController(SETTINGS)
    first = [controller.send(0.0) for _ in range(20)]
    for one in first[:10]:
        controller.accepted(one, 0.05)
    controller.refused(first[10], 0.05)
    pace = controller.pace
    for one in first[11:]:
        controller.refused(one, 0.06)
    assert controller.pace == pace
    assert controller.in_flight == 0


def test_calls_that_fail_teach_nothing() -> None:
    controller = LimitController(SETTINGS)
    for _ in range(50):
        controller.failed(controller.send(0.0))
    assert (controller.in_flight, controller.window, controller.pace) == (0, 20, None)


def test_refusals_before_any_answer_make_the_window_smaller() -> None:
    controller = LimitController(SETTINGS)
    sent = [controller.send(0.0) for _ in range(20)]
    controller.refused(sent[0], 0.002)
    assert controller.pace is None
    assert 1 <= controller.window <= 10
    assert controller.ready_at(0.01) == math.inf

import json
import random
from pathlib import Path

import pytest

from stillroom.train.on_policy.alarms import find_alarms

HEALTHY = {
    "teacher_kl": 0.2,
    "response_tokens": 40.0,
    "truncated": 0.02,
    "repetition": 0.05,
    "entropy": 0.6,
    "logprob_gap": 1e-5,
    "failed": 0.0,
}


def run(num=40, **curves):
    """The metrics of a healthy run whose named curves go from one value to another."""
    rng = random.Random(0)
    history = []
    for i in range(num):
        done = i / (num - 1)
        metrics = {**HEALTHY, "teacher_kl": 0.2 * (1 - 0.8 * done)}
        for name, (first, last) in curves.items():
            metrics[name] = first + (last - first) * done
        history.append({name: v * rng.uniform(0.9, 1.1) for name, v in metrics.items()})
    return history


def names(history):
    return {alarm.name for alarm in find_alarms(history)}


def test_a_healthy_run_has_no_alarms_at_any_time():
    history = run(60)

    assert all(names(history[:i]) == set() for i in range(61))


@pytest.mark.parametrize(
    ("name", "curves"),
    [
        ("truncation", {"truncated": (0.02, 0.5)}),
        ("length_inflation", {"response_tokens": (40, 120)}),
        ("length_inflation", {"response_tokens": (40, 75), "truncated": (0.0, 0.2)}),
        ("repetition", {"repetition": (0.05, 0.6)}),
        ("entropy_collapse", {"entropy": (0.6, 0.01), "teacher_kl": (0.2, 0.15)}),
        ("kl_not_falling", {"teacher_kl": (0.2, 0.2)}),
        ("kl_not_falling", {"teacher_kl": (0.2, 0.4)}),
        ("sampler_mismatch", {"logprob_gap": (0.1, 0.1)}),
        ("failed_rollouts", {"failed": (0.0, 0.5)}),
    ],
)
def test_each_failure_has_its_alarm_which_says_what_to_change(name, curves):
    alarms = find_alarms(run(40, **curves))

    (found,) = [alarm for alarm in alarms if alarm.name == name]
    assert any(word in found.text for word in ("rollout.", "trainer.", "algorithm.", "model."))


def test_a_divergence_that_had_fallen_and_rises_is_told():
    history = run(20, teacher_kl=(0.2, 0.05)) + run(15, teacher_kl=(0.05, 0.18))

    assert names(history) == {"kl_rising"}


def test_longer_answers_alone_are_no_inflation_before_they_are_much_longer():
    assert names(run(40, response_tokens=(40, 70))) == set()


def test_a_sharper_student_that_comes_nearer_has_not_collapsed():
    assert names(run(40, entropy=(0.6, 0.05))) == set()


def test_calls_of_tools_that_repeat_from_the_start_are_no_alarm():
    assert names(run(40, repetition=(0.35, 0.37))) == set()


def test_a_student_that_is_as_near_as_one_gets_need_not_come_nearer():
    assert names(run(40, teacher_kl=(0.01, 0.015))) == set()


def test_what_grows_by_the_curriculum_is_not_compared():
    short = [{**metrics, "prefix_tokens": 16.0} for metrics in run(20, response_tokens=(16, 16))]
    long = run(8, response_tokens=(90, 90), teacher_kl=(0.04, 0.04))

    assert names(short + long) == set()
    assert names([{**m, "prefix_tokens": 90.0} for m in short + long]) == {"length_inflation"}


def test_the_steps_of_a_cold_start_say_nothing():
    cold = [{"cold_start_loss": 2.0, "learning_rate": 1e-3}] * 30

    assert names(cold + run(12)) == set()


def test_stale_tokens_may_differ_from_the_trainers():
    history = [{**metrics, "staleness": 0.5} for metrics in run(40, logprob_gap=(0.1, 0.1))]

    assert names(history) == set()


def test_an_alarm_goes_when_what_it_is_about_has_gone():
    history = run(20, truncated=(0.4, 0.4))

    assert names(history) == {"truncation"}
    assert names(history + run(20)) == set()


def test_the_demos_own_run_has_no_alarms_at_any_time():
    """What start_training wrote to events.jsonl: a cold start's student, few turns first."""
    lines = (Path(__file__).parents[3] / "golden/demo_distill_curves.jsonl").read_text()
    history = [json.loads(line) for line in lines.splitlines()]

    assert history[-1]["teacher_kl"] < history[10]["teacher_kl"] / 2
    assert all(names(history[:i]) == set() for i in range(len(history) + 1))

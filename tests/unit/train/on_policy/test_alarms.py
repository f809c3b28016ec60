import json
import random
from pathlib import Path

import pytest

from stillroom.train.config.schema import DistillConfig
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


def config_of(**sections):
    return DistillConfig.model_validate(
        {
            "dataset_type": "distill",
            "data": {"train_file": "prompts.jsonl", "batch_size": 8},
            "teacher": {"path": "demo/teacher"},
            "trainer": {"num_epochs": 1, "learning_rate": 1e-4},
            **sections,
            "model": {"path": "demo/student", "qlora_rank": 32, **sections.get("model", {})},
        }
    )


PLAIN = config_of(rollout={"max_turns": 6})


def names(history):
    return {alarm.name for alarm in find_alarms(history, PLAIN)}


def advice(name, history, config, **known):
    alarms = find_alarms(history, config, **known)
    (text,) = [alarm.text for alarm in alarms if alarm.name == name]
    return text


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
        ("beyond_the_teachers_context", {"left_out": (0.0, 0.5)}),
        ("tail", {"tail": (0.03, 0.028)}),
        ("not_compared", {"byte_share": (0.0, 0.0), "not_compared": (1.0, 1.0)}),
        ("not_compared", {"byte_share": (0.9, 0.3), "not_compared": (0.1, 0.4)}),
    ],
)
def test_each_failure_has_its_alarm_which_says_what_to_change(name, curves):
    alarms = find_alarms(run(40, **curves), PLAIN)

    (found,) = [alarm for alarm in alarms if alarm.name == name]
    assert any(word in found.text for word in ("rollout.", "trainer.", "algorithm.", "model."))


def test_a_divergence_that_had_fallen_and_rises_is_told():
    history = run(20, teacher_kl=(0.2, 0.05)) + run(15, teacher_kl=(0.05, 0.18))

    assert names(history) == {"kl_rising"}


def sampled(rng, per_token, *, num_rollouts=16, bad=0.0):
    """An iteration's teacher_kl: of some rollouts a tenth is far off and ten times as long."""
    sizes = [600 if rng.random() < bad else 60 for _ in range(num_rollouts)]
    sums = [
        size * (2.0 if size > 60 else per_token * rng.lognormvariate(-0.125, 0.5)) for size in sizes
    ]
    return sum(sums) / sum(sizes)


def test_a_bad_rollout_now_and_then_is_no_rise():
    rng = random.Random(0)
    falling = [0.05 + 0.25 * max(0.0, 1 - i / 50) for i in range(100)]
    history = [{**HEALTHY, "teacher_kl": sampled(rng, kl, bad=0.005)} for kl in falling]
    assert max(metrics["teacher_kl"] for metrics in history[60:]) > 0.4

    assert all("kl_rising" not in names(history[:i]) for i in range(101))
    risen = [{**HEALTHY, "teacher_kl": sampled(rng, 0.15, bad=0.005)} for _ in range(10)]
    assert names(history + risen) == {"kl_rising"}


def test_rollouts_that_go_wrong_by_one_token_are_told_unless_they_succeed():
    def names_at(**curves):
        return names(run(40, **{"response_tokens": (60, 60), **curves}))

    # 1.5 % a token is 60 % of the rollouts of 60 tokens.
    assert names_at(tail=(0.015, 0.015), reward=(0.03, 0.03)) == {"tail"}
    assert names_at(tail=(0.015, 0.015), reward=(0.9, 0.9)) == set()
    assert names_at(tail=(0.06, 0.0), reward=(0.03, 0.03)) == set()
    assert names_at(tail=(0.001, 0.001), reward=(0.03, 0.03)) == set()


def test_no_alarm_advises_what_the_configuration_does():
    risen = run(20, teacher_kl=(0.2, 0.05)) + run(15, teacher_kl=(0.05, 0.18))
    flat, gap = run(40, teacher_kl=(0.2, 0.2)), run(40, logprob_gap=(0.1, 0.1))
    tail = run(40, tail=(0.03, 0.03))
    long = run(40, response_tokens=(40, 120))
    served = {"path": "m", "provider": "vllm"}

    assert "curriculum.first_turns" in advice("kl_rising", risen, PLAIN)
    assert "curriculum" not in advice("kl_rising", risen, config_of())
    grown = config_of(rollout={"max_turns": 6}, curriculum={"first_turns": 2, "turn_steps": 9})
    assert "curriculum" not in advice("kl_rising", risen, grown)
    assert "cold_start" in advice("kl_not_falling", flat, PLAIN)
    assert "SFT" not in advice("kl_not_falling", flat, PLAIN, is_trained=True)
    assert "evaluate_model" in advice("kl_not_falling", flat, PLAIN, is_trained=True)
    assert "cold_start" not in advice(
        "kl_not_falling", flat, config_of(cold_start={"train_file": "sft.jsonl"})
    )
    sampled_loss = config_of(algorithm={"loss_fn": "ppo"})
    assert "full_reverse_kl" not in advice("kl_not_falling", flat, PLAIN)
    assert "full_reverse_kl" in advice("kl_not_falling", flat, sampled_loss)
    assert "full_reverse_kl" not in advice("kl_not_falling", flat, config_of(teacher=served))
    assert "importance_cap" not in advice("sampler_mismatch", gap, PLAIN)
    assert "importance_cap" in advice("sampler_mismatch", gap, sampled_loss)
    exact = config_of(model={"precision": "fp32"})
    assert "fp32" not in advice("sampler_mismatch", gap, exact)
    assert "mask_special_tokens" not in advice("length_inflation", long, PLAIN)
    assert "qlora_rank: 0" in advice("tail", tail, PLAIN)
    assert "qlora_rank" not in advice("tail", tail, config_of(model={"qlora_rank": 0}))


def test_what_grows_by_the_curriculum_is_not_compared():
    short = [{**metrics, "prefix_tokens": 16.0} for metrics in run(20, response_tokens=(16, 16))]
    long = run(8, response_tokens=(90, 90), teacher_kl=(0.04, 0.04))

    assert names(short + long) == set()
    assert names([{**m, "prefix_tokens": 90.0} for m in short + long]) == {"length_inflation"}


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

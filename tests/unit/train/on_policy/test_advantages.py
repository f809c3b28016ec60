import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.train.on_policy.training_sequences import decay_advantage, reward_advantages

REWARDS = [1.0, 0.0, 0.0, 0.5, None, 1.0]
PROMPTS = ["a", "a", "a", "b", "b", "b"]


def test_grpo_compares_with_the_mean_of_the_prompt():
    found = reward_advantages(REWARDS, PROMPTS, estimator="grpo")

    assert found == pytest.approx([2 / 3, -1 / 3, -1 / 3, -0.25, 0.0, 0.25])


def test_gae_compares_with_the_prompts_other_rollouts():
    found = reward_advantages(REWARDS, PROMPTS, estimator="gae")

    assert found == pytest.approx([1.0, -0.5, -0.5, -0.5, 0.0, 0.5])


def test_reinforce_compares_with_all_other_rollouts_that_have_a_reward():
    found = reward_advantages(REWARDS, PROMPTS, estimator="reinforce")

    # The sum is 2.5 over five rewards; each against the mean of the other four.
    assert found == pytest.approx([1 - 1.5 / 4, -2.5 / 4, -2.5 / 4, 0.5 - 2 / 4, 0.0, 1 - 1.5 / 4])


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abc")), max_size=12),
    st.sampled_from(["grpo", "gae", "reinforce"]),
)
def test_advantages_of_those_that_are_compared_add_up_to_nothing(rows, estimator):
    prompts = [prompt for _, prompt in rows]

    found = reward_advantages([r for r, _ in rows], prompts, estimator=estimator)

    assert sum(found) == pytest.approx(0.0, abs=1e-9)


def test_an_advantage_decays_from_the_end_to_the_beginning():
    assert decay_advantage(2.0, 3, gae_lambda=0.5) == [0.5, 1.0, 2.0]
    assert decay_advantage(-1.0, 4, gae_lambda=1.0) == [-1.0] * 4
    assert decay_advantage(1.0, 0, gae_lambda=0.5) == []


def test_decay_is_generalised_advantage_estimation_with_one_value_for_all_states():
    """By the definition: a sum of TD errors, each discounted by λ a step."""
    value, reward, num, decay = 0.4, 1.0, 5, 0.8
    errors = [value - value] * (num - 1) + [reward - value]
    wanted = [
        sum(decay ** (later - t) * errors[later] for later in range(t, num)) for t in range(num)
    ]

    assert decay_advantage(reward - value, num, gae_lambda=decay) == pytest.approx(wanted)

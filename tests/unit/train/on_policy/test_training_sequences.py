import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.train.on_policy.training_sequences import decay_advantage, reward_advantages

REWARDS = [1.0, 0.0, 0.0, 0.5, None, 1.0]
PROMPTS = ["a", "a", "a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("estimator", "advantages"),
    [
        # The mean of the prompt.
        ("grpo", [2 / 3, -1 / 3, -1 / 3, -0.25, 0.0, 0.25]),
        # The mean of the prompt's other rollouts.
        ("gae", [1.0, -0.5, -0.5, -0.5, 0.0, 0.5]),
        # The mean of all other rewards: their sum is 2.5, and there are five.
        ("reinforce", [1 - 1.5 / 4, -2.5 / 4, -2.5 / 4, 0.5 - 2 / 4, 0.0, 1 - 1.5 / 4]),
    ],
)
def test_an_advantage_is_a_reward_compared_with_others(estimator, advantages):
    found = reward_advantages(REWARDS, PROMPTS, estimator=estimator)

    assert found == pytest.approx(advantages)


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

"""An example of rewards.py: 1 is good, 0 is bad. Rows with metadata.expected_answer need no code.

Rename this file to rewards.py and write your own rewards, or delete it. Several rewards
are summed, and a sum of 0.5 or more is a success. Use @reward(precondition=True) for a condition
that every success needs: if it is 0, the sum is 0; otherwise the other rewards decide.
"""

from stillroom.tools import RewardArgs, reward


@reward
def mentions_expected(args: RewardArgs, messages: list) -> float:
    """Returns 1 if the last answer contains the expected text."""
    expected = str(args.metadata.get("expected_answer", ""))
    answer = messages[-1].get("content") or ""
    return float(bool(expected) and expected.lower() in answer.lower())

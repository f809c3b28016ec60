"""An example of rewards.py: 1 is good, 0 is bad. Rows with metadata.expected_answer need no code.

Rename it to rewards.py and write your own, or delete it. Several rewards are summed, and a sum of
0.5 is a success, though not each of them may be one. What must hold for any success is written as
@reward(precondition=True): where it is 0, the sum is 0; otherwise the other rewards decide.
"""

from stillroom.tools import RewardArgs, reward


@reward
def mentions_expected(args: RewardArgs, messages: list) -> float:
    """Whether the last answer holds the expected text."""
    expected = str(args.metadata.get("expected_answer", ""))
    answer = messages[-1].get("content") or ""
    return float(bool(expected) and expected.lower() in answer.lower())

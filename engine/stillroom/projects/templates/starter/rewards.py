"""Rewards of answers: 1 is good, 0 is bad. Rows with metadata.expected_answer need no code."""

from stillroom.tools import RewardArgs, reward


@reward
def mentions_expected(args: RewardArgs, messages: list) -> float:
    """Whether the last answer holds the expected text."""
    expected = str(args.metadata.get("expected_answer", ""))
    answer = messages[-1].get("content") or ""
    return float(bool(expected) and expected.lower() in answer.lower())

"""The reward of an answer: 1 if it states exactly the expected number, else 0."""

import re
from typing import Any

from stillroom.tools import RewardArgs, reward


@reward()
def correct_answer(args: RewardArgs, messages: list[dict[str, Any]]) -> float:
    """Returns 1.0 if the last assistant text states exactly the expected answer."""
    texts = [message["content"] or "" for message in messages if message["role"] == "assistant"]
    stated = re.findall(r"The answer is (-?\d+)\.", texts[-1]) if texts else []
    return float(stated == [args.metadata["expected_answer"]])

"""The tools that a model can call, and the names that a user's tools.py and rewards.py import."""

from stillroom.tools.user.file import RewardArgs, ToolArgs, get_response, reward, tool

__all__ = ["RewardArgs", "ToolArgs", "get_response", "reward", "tool"]

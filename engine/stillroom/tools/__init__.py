"""Tools a model can call, and what a user's own tools.py and rewards.py import."""

from stillroom.tools.user.file import RewardArgs, ToolArgs, reward, tool

__all__ = ["RewardArgs", "ToolArgs", "reward", "tool"]

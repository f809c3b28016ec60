"""Rollout layouts of other systems, and how each becomes ours."""

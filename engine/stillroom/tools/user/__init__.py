"""A user's tools.py and rewards.py, run in child processes."""

"""Rollouts: a policy or teacher works through tasks, turn by turn, with tools and rewards."""

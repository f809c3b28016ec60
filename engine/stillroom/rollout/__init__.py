"""Rollouts: a policy or teacher works on tasks turn by turn, with tools and rewards."""

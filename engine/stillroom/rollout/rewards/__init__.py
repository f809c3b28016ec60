"""Rewards: a user's rewards.py, a match with the expected answer, or a judging model."""

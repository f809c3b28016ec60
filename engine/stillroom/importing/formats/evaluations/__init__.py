"""Readers of results of evaluations and environments."""

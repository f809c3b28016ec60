"""Readers of the results of evaluations and environments."""

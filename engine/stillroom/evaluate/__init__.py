"""Evaluation: how good a model is on held-out tasks, with 95 % confidence intervals."""

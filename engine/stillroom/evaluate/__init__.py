"""Evaluation: how good a model is on tasks nobody trained on, and how sure that is."""

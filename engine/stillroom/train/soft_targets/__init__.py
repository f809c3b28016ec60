"""Supervised training against a teacher's probabilities, read live or from a store."""

"""Curation turns rollouts into training rows, and counts why each other row is left out."""

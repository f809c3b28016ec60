"""Writes imported rollouts: rows, prompts, the held-out split, scores and notes."""

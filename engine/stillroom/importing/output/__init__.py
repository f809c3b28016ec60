"""Writes imported rollouts: rows, prompts, the held-out part, scores, and what to know of them."""

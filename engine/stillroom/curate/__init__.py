"""Turns rollouts into training rows, and counts by reason the rows that it leaves out."""

"""Rollouts as they happen: one episode turn by turn, and many at once."""

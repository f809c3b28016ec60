"""Plays rollouts: one episode turn by turn, and many episodes at once."""

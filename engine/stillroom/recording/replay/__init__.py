"""Answers recorded calls again, from their journals alone."""

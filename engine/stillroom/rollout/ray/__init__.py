"""Rollouts over a Ray cluster."""

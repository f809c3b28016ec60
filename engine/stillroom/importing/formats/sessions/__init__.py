"""Readers of the sessions and trajectories that agents leave behind."""

"""Rollout runs that are split over the workers of a Ray cluster."""

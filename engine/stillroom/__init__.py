"""Stillroom's engine: rollouts, curation, training and evaluation behind `stillroom.api`."""

__version__ = "0.1.0"

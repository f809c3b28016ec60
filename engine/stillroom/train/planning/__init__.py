"""Forecasts the memory, disk and time of a training run."""

"""Readers of what observability tools export: spans, observations and runs."""

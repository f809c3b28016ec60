"""Readers of what APIs and gateways log: one row for each call."""

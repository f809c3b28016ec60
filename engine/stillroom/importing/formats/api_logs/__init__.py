"""Readers of logs of APIs and gateways, with one row per call."""

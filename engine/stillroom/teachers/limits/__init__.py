"""Learns from an endpoint's headers and refusals how fast it may be called, and keeps to that."""

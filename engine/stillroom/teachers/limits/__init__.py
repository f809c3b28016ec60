"""Adapts the rate and concurrency of calls to an endpoint's headers and 429 responses."""

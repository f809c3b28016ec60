"""A proxy that forwards model calls to their endpoint and records them, and a replay of them."""

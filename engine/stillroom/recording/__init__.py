"""A proxy that passes model calls on to their endpoint, records them, and can answer them again."""

"""Rollouts from what people already have: traces, sessions, logs and other systems' files."""

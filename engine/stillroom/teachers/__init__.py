"""Calls teachers behind OpenAI-compatible endpoints, or runs one in-process to score tokens."""

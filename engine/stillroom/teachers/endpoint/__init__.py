"""Calls a teacher behind an OpenAI-compatible endpoint: connections, retries and responses."""

"""A teacher behind an OpenAI-compatible endpoint: connections, calls, retries and replies."""

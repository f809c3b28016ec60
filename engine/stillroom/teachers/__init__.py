"""Teachers: behind an OpenAI-compatible endpoint, or in-process to score the student's tokens."""

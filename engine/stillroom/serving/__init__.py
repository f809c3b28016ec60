"""Models behind a vLLM or SGLang server: as a teacher that scores tokens, and as the student."""

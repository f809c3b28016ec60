"""Models behind a vLLM or SGLang server: a teacher that scores tokens, or the student."""

"""Uses a model behind a vLLM or SGLang server, as a teacher that scores or as the student."""

"""Resources, prompts and completions of the server."""

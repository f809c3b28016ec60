"""What the server offers besides tools: resources, prompts, completions."""

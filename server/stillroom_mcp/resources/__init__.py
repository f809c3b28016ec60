"""What a host can read, choose and complete beside tools: resources, prompts, completions."""

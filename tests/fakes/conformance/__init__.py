"""Tools, resources, prompts and tasks that the conformance suite of MCP calls by name."""

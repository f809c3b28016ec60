"""Tools of MCP servers that run in containers, with a container for each rollout."""

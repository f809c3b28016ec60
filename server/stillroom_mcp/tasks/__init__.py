"""Long calls as tasks, for clients that support the tasks extension of MCP."""

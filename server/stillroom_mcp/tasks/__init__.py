"""Long calls as tasks, for clients that know the tasks extension of MCP."""

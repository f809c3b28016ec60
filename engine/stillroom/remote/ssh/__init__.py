"""A machine that the system's own ssh reaches: the connection, its errors, the agent's code."""

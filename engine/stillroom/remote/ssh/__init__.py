"""Machines that are reached with the system's ssh: the connection, and the agent's installation."""

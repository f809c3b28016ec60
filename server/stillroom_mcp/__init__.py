"""Stillroom's doors: the MCP server and the command line over `stillroom.api`."""

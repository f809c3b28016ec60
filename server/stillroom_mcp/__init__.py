"""The two user interfaces over `stillroom.api`: the MCP server and the command line."""

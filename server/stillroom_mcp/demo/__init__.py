"""The command `stillroom demo`: a complete distillation through an MCP client."""

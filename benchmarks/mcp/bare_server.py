"""The least MCP server: one tool, of the same SDK."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("bare", log_level="WARNING")


@server.tool()
def echo(text: str) -> dict[str, str]:
    """Returns the text."""
    return {"text": text}


if __name__ == "__main__":
    server.run("stdio")

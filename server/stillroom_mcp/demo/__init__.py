"""The command `stillroom demo`: an MCP client drives the server through a whole distillation."""

from stillroom_mcp.demo.chain import FULL, SMOKE
from stillroom_mcp.demo.run import run_demo

__all__ = ["FULL", "SMOKE", "run_demo"]

"""The command `stillroom demo`: an MCP client drives the server through a whole distillation."""

from stillroom_mcp.demo.run import run_demo
from stillroom_mcp.demo.settings import FULL, SMOKE

__all__ = ["FULL", "SMOKE", "run_demo"]

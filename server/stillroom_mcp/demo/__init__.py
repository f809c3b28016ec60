"""The command `stillroom demo`: a complete distillation through an MCP client."""

from stillroom_mcp.demo.chain import FULL, SMOKE
from stillroom_mcp.demo.run import run_demo

__all__ = ["FULL", "SMOKE", "run_demo"]

"""`python -m stillroom_mcp` is the command line."""

from stillroom_mcp.cli import main

main()

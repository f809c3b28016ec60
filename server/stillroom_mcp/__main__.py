"""Makes `python -m stillroom_mcp` run the command line."""

from stillroom_mcp.cli import main

main()

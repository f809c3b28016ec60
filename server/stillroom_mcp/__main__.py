"""Makes `python -m stillroom_mcp` run the program."""

from stillroom_mcp.starting.entry import main

main()

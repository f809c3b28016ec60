"""Starts a server over standard input and output and prints how many tools it lists.

Usage: python scripts/package/list_tools.py PROGRAM
"""

import sys

import anyio
from mcp import Client, StdioServerParameters


async def _main(program: str) -> None:
    server = StdioServerParameters(command=program, args=["serve"])
    with anyio.fail_after(60):
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
    if not tools:
        sys.exit("error: the server lists no tool")
    sys.stdout.write(f"the server lists {len(tools)} tools\n")


anyio.run(_main, sys.argv[1])

"""An example of tools.py: tools that teacher and student may call. Models read their docstrings.

Rename this file to tools.py and write your own tools, or delete it. Training uses a tools.py next
to config.yml.
"""

from stillroom.tools import ToolArgs, tool

WAREHOUSES = {"Hamburg": 120, "Lyon": 64, "Turin": 15}


@tool
def free_space(warehouse: str) -> int:
    """Free pallets in a warehouse."""
    if warehouse not in WAREHOUSES:
        # The model gets the text of a ValueError, and can then correct its call.
        raise ValueError(f"unknown warehouse; there are {', '.join(WAREHOUSES)}")
    return WAREHOUSES[warehouse]


@tool(timeout=10)
def task_note(args: ToolArgs) -> str:
    """A note about the current task."""
    return str(args.metadata.get("note", "none"))

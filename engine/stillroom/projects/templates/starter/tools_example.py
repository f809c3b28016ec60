"""An example of tools.py: tools that teacher and student may call; a model reads their docstrings.

Rename it to tools.py and write your own, or delete it. A tools.py next to config.yml is used in
training.
"""

from stillroom.tools import ToolArgs, tool

WAREHOUSES = {"Hamburg": 120, "Lyon": 64, "Turin": 15}


@tool
def free_space(warehouse: str) -> int:
    """Free pallets in a warehouse."""
    if warehouse not in WAREHOUSES:
        # The text of a ValueError goes to the model, which may then mend its call.
        raise ValueError(f"unknown warehouse; there are {', '.join(WAREHOUSES)}")
    return WAREHOUSES[warehouse]


@tool(timeout=10)
def task_note(args: ToolArgs) -> str:
    """A note about the present task."""
    return str(args.metadata.get("note", "none"))

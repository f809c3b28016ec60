"""The schemas of the functions in tools.py, for supervised rows that name their tools."""

from pathlib import Path

import anyio

from stillroom.data.tool_names import NamedTools, has_tool_names
from stillroom.tools.user.file import UserFile, read_user_file
from stillroom.tools.user.pool import UserPool
from stillroom.types import ToolSchema

TOOLS_FILE = "tools.py"


def schemas_in(file: UserFile) -> NamedTools:
    """Returns the schemas of a tools.py by name, loaded in a process of its own that then ends.

    It is called where no event loop runs. Raises ToolFileError if the file cannot be loaded.
    """

    async def load() -> list[ToolSchema]:
        async with UserPool(tools_file=file, rewards_file=None) as pool:
            return list(pool.schemas)

    return {schema["function"]["name"]: schema for schema in anyio.run(load)}


def tools_named_in(rows: Path, *folders: Path) -> NamedTools | None:
    """Returns the tools for the rows of a file: of the first tools.py beside it, or in a folder.

    None if its rows name no tools, or there is no tools.py.
    """
    if not rows.is_file() or not has_tool_names(rows):
        return None
    places = [folder / TOOLS_FILE for folder in (rows.parent, *folders)]
    found = next((place for place in places if place.is_file()), None)
    return None if found is None else schemas_in(read_user_file(found))

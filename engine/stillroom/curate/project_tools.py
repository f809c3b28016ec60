"""Adds the schemas of the project's tools.py to rows that call tools but have no schemas."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from stillroom.errors import EngineError
from stillroom.lineage import FileRecord, record_file

TOOLS_FILE = "tools.py"


class ProjectTools:
    """The tools.py of a project; it is loaded when a row first needs it."""

    def __init__(self, *folders: Path) -> None:
        """The first tools.py that exists in one of the folders is used."""
        files = (folder / TOOLS_FILE for folder in folders)
        self._path = next((file for file in files if file.is_file()), None)
        self._is_loaded = False
        self._names = list[str]()
        self._schemas = msgspec.Raw(b"[]")
        self._record: FileRecord | None = None
        self._problem: str | None = None

    def load(self) -> None:
        """Loads the file, once. If that fails, no row takes schemas and a note says why."""
        if self._is_loaded or self._path is None:
            return
        # Imported here, since few conversions run the user's code.
        from stillroom.tools.user.file import read_user_file
        from stillroom.tools.user.pool import schemas_in

        self._is_loaded = True
        try:
            schemas = schemas_in(read_user_file(self._path))
            self._record = record_file(self._path)
        except EngineError as error:
            # The message of an exception is text from the file, so it is left out of the note.
            location, failed, text = error.problem.partition("loading failed: ")
            self._problem = location + failed + text.partition(":")[0]
            return
        self._names = list(schemas)
        self._schemas = msgspec.Raw(msgspec.json.encode(list(schemas.values())))

    def schemas_for(self, called: Iterable[str]) -> msgspec.Raw | None:
        """Returns the schemas of all tools as JSON; None if one of the called tools has none."""
        self.load()
        return self._schemas if self._names and set(called) <= set(self._names) else None

    def notes(self, num_filled: int, num_rows: int) -> list[str]:
        """Returns a note on the rows that took the schemas, or on a file that cannot be loaded."""
        if self._problem is not None:
            return [
                f"no row has schemas from {TOOLS_FILE}, which cannot be loaded: {self._problem}"
            ]
        if not num_filled:
            return []
        note = (
            f"{num_filled} of {num_rows} rows call tools but had no schemas: they now have the "
            f"schemas of {TOOLS_FILE} ({', '.join(self._names)}). If the model was offered other "
            "tools, write their schemas into the input's tools"
        )
        return [note]

    def records(self, num_filled: int) -> list[FileRecord]:
        """Returns the record of the file if rows took its schemas, or []."""
        return [self._record] if num_filled and self._record is not None else []

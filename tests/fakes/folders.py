"""What is in a folder."""

from pathlib import Path


def names_in(folder: Path) -> list[str]:
    """The names of all entries, hidden ones included, sorted."""
    return sorted(path.name for path in folder.iterdir())

"""What is in a folder, and file systems that are soon full."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MAY_MOUNT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not Path("/bin/mount").exists(),
    reason="only root may mount a small disk",
)


def names_in(folder: Path) -> list[str]:
    """The names of all entries, hidden ones included, sorted."""
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Puts a file system of its own at the folder."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(folder)], check=True, timeout=20)


def mount(*options: str) -> None:
    subprocess.run(["/bin/mount", *options], check=True, timeout=20)

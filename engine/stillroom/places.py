"""Opens files and folders for writing without following a symbolic link on the way.

A link inside the workspace may lead anywhere. So nothing is opened for writing by its whole path:
each folder on the way is opened in the one above it, and a link is refused. A link that is put in
place between a check and the writing is refused in the same way.
"""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from stillroom.errors import InputError

# O_PATH needs no right to list the folders on the way; only Linux has it.
_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Adds this path to an OSError that names no file, so that its reader knows which one it is."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class RealFolder:
    """An open folder, in which files are opened, renamed and deleted by their names.

    They stay in this folder even if something else is put at its path meanwhile.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle

    def open(self, name: str, flags: int) -> int:
        """Opens a file of the folder and returns its descriptor. Raises InputError for a link."""
        with self._naming(name):
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, mode=0o644, dir_fd=self._handle)

    def rename(self, name: str, new_name: str) -> None:
        """Renames a file or folder; a file that has the new name is replaced."""
        with self._naming(new_name):
            os.replace(name, new_name, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def link(self, name: str, new_name: str) -> None:
        """Gives a file a second name. Raises FileExistsError if something has that name."""
        with self._naming(new_name):
            os.link(name, new_name, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """Deletes a file if it is there; of a link only the link."""
        with self._naming(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)

    def inner(self, name: str, *, create: bool) -> "RealFolder":
        """Opens a folder in this one; makes it first if it is not there and `create` is set."""
        with self._naming(name):
            try:
                handle = os.open(name, _ON_THE_WAY, dir_fd=self._handle)
            except FileNotFoundError:
                if not create:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self._handle)
                handle = os.open(name, _ON_THE_WAY, dir_fd=self._handle)
        return RealFolder(self.path / name, handle)

    @contextmanager
    def _naming(self, name: str) -> Generator[None]:
        """Raises InputError instead of an OSError that a link causes; others get the whole path."""
        path = self.path / name
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                mode = os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    raise InputError(
                        f"{path} is a symbolic link, and nothing is written through one",
                        "replace it with a real file or folder, or start stillroom with "
                        "--workspace set to the folder that it leads to",
                    ) from error
            raise OSError(error.errno, error.strerror, str(path)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def real_folder(path: Path, *, create: bool = True) -> RealFolder:
    """Opens a folder to which no link is on the way; creates missing folders.

    Raises InputError if there is a link, and OSError for everything else.
    """
    path = path.absolute()
    folder = RealFolder(Path(path.anchor), os.open(path.anchor, _ON_THE_WAY))
    for name in path.parts[1:]:
        with folder:
            folder = folder.inner(name, create=create)
    return folder


def open_real(path: Path, flags: int) -> int:
    """Opens a file for writing, to which no link is on the way; makes the folders above it.

    Returns its descriptor. Raises InputError if the file, or a folder on the way, is a link.
    """
    with real_folder(path.parent) as folder:
        return folder.open(path.name, flags)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, unless they are there. Raises InputError for a link."""
    with real_folder(path):
        return


def put_folder(temporary: Path, path: Path) -> None:
    """Renames a folder within its parent. Raises InputError if either is a link by now."""
    with (
        real_folder(path.parent, create=False) as parent,
        parent.inner(temporary.name, create=False),
    ):
        parent.rename(temporary.name, path.name)

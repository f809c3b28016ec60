"""Opens files and folders for writing without following symbolic links.

A link inside the workspace may lead anywhere. So no file is opened for writing by its whole path:
each folder of the path is opened relative to its parent, and links are refused. This also covers a
link that appears between a check and the write.
"""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from stillroom.errors import InputError

# O_PATH (Linux only) does not need permission to list the parent folders.
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def add_path_to_errors(path: Path) -> Generator[None]:
    """Adds the path to an OSError of the block if the error names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class RealFolder:
    """An open folder, in which files are opened, renamed and deleted by name.

    Operations use this folder even if its path is replaced meanwhile.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle

    def open(self, name: str, flags: int) -> int:
        """Opens a file of the folder and returns its descriptor. Raises InputError for a link."""
        with self._add_path_to_errors(name):
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, mode=0o644, dir_fd=self._handle)

    def rename(self, name: str, new_name: str) -> None:
        """Renames a file or folder; a file that has the new name is replaced."""
        with self._add_path_to_errors(new_name):
            os.replace(name, new_name, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def link(self, name: str, new_name: str) -> None:
        """Adds a hard link to a file. Raises FileExistsError if the new name exists."""
        with self._add_path_to_errors(new_name):
            os.link(name, new_name, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """Deletes a file if it exists; for a link, only the link is deleted."""
        with self._add_path_to_errors(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)

    def open_subfolder(self, name: str, *, create: bool) -> "RealFolder":
        """Opens a subfolder; with `create`, creates it first if it does not exist."""
        with self._add_path_to_errors(name):
            try:
                handle = os.open(name, _FOLDER_FLAGS, dir_fd=self._handle)
            except FileNotFoundError:
                if not create:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self._handle)
                handle = os.open(name, _FOLDER_FLAGS, dir_fd=self._handle)
        return RealFolder(self.path / name, handle)

    @contextmanager
    def _add_path_to_errors(self, name: str) -> Generator[None]:
        """Turns an OSError caused by a link into an InputError, and adds the path to others."""
        path = self.path / name
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                mode = os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    raise InputError(
                        f"{path} is a symbolic link, and stillroom does not write through links",
                        "replace it with a real file or folder, or start stillroom with "
                        "--workspace set to the folder that it leads to",
                    ) from error
            raise OSError(error.errno, error.strerror, str(path)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def real_folder(path: Path, *, create: bool = True) -> RealFolder:
    """Opens a folder whose path contains no link; creates missing folders.

    Raises InputError if the path contains a link, and OSError for other problems.
    """
    path = path.absolute()
    folder = RealFolder(Path(path.anchor), os.open(path.anchor, _FOLDER_FLAGS))
    for name in path.parts[1:]:
        with folder:
            folder = folder.open_subfolder(name, create=create)
    return folder


def open_real(path: Path, flags: int) -> int:
    """Opens a file for writing, creates its parent folders, and returns the file descriptor.

    Raises InputError if the file or one of its parent folders is a link.
    """
    with real_folder(path.parent) as folder:
        return folder.open(path.name, flags)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents if they do not exist. Raises InputError for a link."""
    with real_folder(path):
        return


def rename_folder(temporary: Path, path: Path) -> None:
    """Renames a folder within its parent. Raises InputError if one of the two is a link."""
    with (
        real_folder(path.parent, create=False) as parent,
        parent.open_subfolder(temporary.name, create=False),
    ):
        parent.rename(temporary.name, path.name)

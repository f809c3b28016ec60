"""The Hugging Face folder of a GGUF file, converted once into the user's cache folder."""

import os
import shutil
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from stillroom.errors import ModelError, missing_extra
from stillroom.files import FileLock, file_sha256, wait_for_disk
from stillroom.models.gguf.header import check_gguf
from stillroom.models.resolve import ModelLocation
from stillroom.places import make_folder, rename_folder

# Increase it when the converter writes something different for the same file.
_CONVERTER_VERSION = 1
CACHE_VARIABLE = "STILLROOM_CACHE"
"""The variable with the folder for converted models, in place of the user's cache folder. Runs on
other machines get it, so that all of their files are in the machine's `folder`."""
_POLL_S = 0.2
_MAX_WAIT_S = 2 * 3600.0


def pretrained_path(location: ModelLocation) -> str:
    """Returns the hub id or folder for `from_pretrained`; a GGUF file is converted first."""
    return str(convert_gguf(location.path)) if location.is_gguf else location.location


def convert_gguf(path: Path) -> Path:
    """Returns the folder of a GGUF file's converted model; converts the file unless it is cached.

    If several processes need the file, one converts it while the others wait. Raises ModelError for
    a file that cannot be converted, and MissingExtraError if the package gguf is not installed.
    """
    check_gguf(path)
    stamp = _stamp(path)
    folder = cache_folder() / f"{_sha256(path, stamp)[:32]}-{_CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise missing_extra("gguf", f"the GGUF file {path.name}")
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        make_folder(folder.parent)
        _acquire(lock, path)
        if not folder.is_dir():
            _convert(path, folder, stamp)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be converted into {folder.parent}: {error}",
            more_space_fix(),
        ) from error
    finally:
        lock.release()
    return folder


def cache_folder() -> Path:
    """Returns the folder of converted models: `stillroom/gguf` in the user's cache folder.

    On another machine, it is `cache/gguf` in the machine's `folder`.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).resolve() / "gguf"
    base = os.environ.get("XDG_CACHE_HOME")
    # Resolved, since the home folder may be a link, and files are not written through links.
    return (Path(base) if base else Path.home() / ".cache").resolve() / "stillroom" / "gguf"


def more_space_fix() -> str:
    """Returns what to do if the disk with the converted models is full."""
    if CACHE_VARIABLE in os.environ:
        return "free disk space there, or set `folder:` in machines.yml to one on another disk"
    return "free disk space there, or set XDG_CACHE_HOME to a folder on another disk"


def _convert(path: Path, folder: Path, stamp: tuple[int, int]) -> None:
    """Writes the converted model to `folder`, which appears only once it is complete."""
    # Imported here, since it loads torch.
    from stillroom.models.gguf.convert import write_folder

    partial = folder.with_name(f".{folder.name}.partial")
    # Left by a process that was killed: no other process converts while this one has the lock.
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        write_folder(path, partial)
        if _stamp(path) != stamp:
            raise ModelError(
                f"{path} changed while it was being converted",
                "repeat the call once no other program is writing to the file",
            )
        for file in (*partial.iterdir(), partial):
            wait_for_disk(file)
        rename_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _acquire(lock: FileLock, path: Path) -> None:
    """Acquires the lock; waits while another process converts the file."""
    if not lock.acquire_within(_MAX_WAIT_S, poll_s=_POLL_S):
        raise ModelError(
            f"another process has been converting {path} for {_MAX_WAIT_S / 3600:g} hours",
            f"end the process that holds {lock.path}, then repeat the call",
        )


def _stamp(path: Path) -> tuple[int, int]:
    """Returns a file's size and modification time, which change when it is written."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=32)
def _sha256(path: Path, _stamp: tuple[int, int]) -> str:
    return file_sha256(path)

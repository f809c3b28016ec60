"""Deletes contents that no run uses any more: old ones, and more where the disk has no room.

Everything in the store is also where it came from, or was brought home; what is deleted is sent
once more if it is needed again.
"""

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_KEPT_S = 14 * 86400.0
_SURELY_KEPT_S = 86400.0
"""Between sending and starting; contents that a run uses have a second name, and are kept too."""
_SPARE_BYTES = 1 << 30


def note_use(path: Path) -> None:
    """Notes that a content is needed: its change of status is the time of its last use.

    Its time of change stays, by which runs that share the file know it.
    """
    with suppress(FileNotFoundError):
        path.chmod(path.stat().st_mode & 0o777)


def make_room(store: Path, num_bytes: int, *, keep: Collection[str], now_s: float) -> list[str]:
    """Deletes contents so that `num_bytes` fit, and those that were not used for two weeks.

    keep: names that stay in any case. Returns the names of what was deleted.
    """
    free = shutil.disk_usage(store).free - _SPARE_BYTES
    deleted: list[str] = []
    for last_used, size, name in _unused(store, keep):
        age_s = now_s - last_used
        if age_s < _SURELY_KEPT_S or (age_s < _KEPT_S and free >= num_bytes):
            break
        with suppress(FileNotFoundError):
            (store / name).unlink()
            free += size
            deleted.append(name)
    return deleted


def _unused(store: Path, keep: Collection[str]) -> list[tuple[float, int, str]]:
    """Returns the files that only the store has, the longest unused first."""
    found: list[tuple[float, int, str]] = []
    with os.scandir(store) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                state = entry.stat(follow_symlinks=False)
                if entry.name not in keep and state.st_nlink == 1:
                    found.append((state.st_ctime, state.st_size, entry.name))
    return sorted(found)

"""Decides which files of a run on another machine are downloaded."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from stillroom.models.resolve import CHECKPOINTS
from stillroom.run_folder import (
    CANCEL_MARK,
    END_FILE,
    FOLLOWER_FILE,
    FOLLOWER_LOCK,
    FOLLOWER_LOG,
    JOB_FILE,
    KILL_MARK,
    LAUNCH_FILE,
    LIMITS_FILE,
    MIRROR_FILE,
    MIRRORED_FILE,
    OWNER_LOCK,
    REMOTE_FILE,
    REQUEST_FILE,
    STATE_FILE,
    VIEW_FILE,
)

LOG_FILES = ("log.txt", "events.jsonl")
"""The growing files of a run's folder that may contain paths of the machine."""
_NOT_DOWNLOADED = frozenset(
    {
        *(STATE_FILE, REQUEST_FILE, LIMITS_FILE, LAUNCH_FILE, OWNER_LOCK, END_FILE),
        *(REMOTE_FILE, VIEW_FILE, MIRROR_FILE, MIRRORED_FILE, JOB_FILE),
        *(FOLLOWER_FILE, FOLLOWER_LOCK, FOLLOWER_LOG, CANCEL_MARK, KILL_MARK),
        *LOG_FILES,
    }
)
"""The files of a run's folder that are not downloaded: each machine has its own, or they grow and
are mirrored."""


def is_safe(path: str) -> bool:
    """Returns whether a path from another machine is relative and stays inside its folder."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def is_downloaded_run_file(path: str, run_id: str) -> bool:
    """Returns whether a path relative to the workspace is in the run's folder and is downloaded."""
    parts = PurePosixPath(path).parts
    if not is_safe(path) or parts[:2] != ("runs", run_id) or len(parts) < 3:
        return False
    return parts[2] not in _NOT_DOWNLOADED and not parts[2].startswith((".incoming", ".spare"))


def is_output(path: str, outputs: Sequence[str]) -> bool:
    """Returns whether a file is one of a run's outputs or belongs to one, like a manifest."""
    return is_safe(path) and any(_belongs_to(PurePosixPath(path), output) for output in outputs)


def is_temporary(name: str) -> bool:
    """Returns whether a file name is that of a lock or of a file that is still being written."""
    endings = (".lock", ".going", ".new", ".shorter")
    infixes = (".partial", ".replaced-")
    return name.startswith(".") and (name.endswith(endings) or any(i in name for i in infixes))


def download_unit(path: str, outputs: Sequence[str]) -> str:
    """Returns the path that is renamed into place after a download: the file, or its folder.

    It is the folder for a checkpoint or an exported model, so that it is complete or absent.
    """
    for output in outputs:
        if path.startswith(f"{output}/"):
            return output
    parts = PurePosixPath(path).parts
    is_checkpoint = len(parts) > 4 and parts[0] == "runs" and parts[2] == CHECKPOINTS
    return "/".join(parts[:4]) if is_checkpoint else path


def _belongs_to(path: PurePosixPath, output: str) -> bool:
    """Returns whether a path is an output, is in an output folder, or is a side file of one."""
    output_path = PurePosixPath(output)
    if output_path in (path, *path.parents):
        return True
    try:
        sibling = path.relative_to(output_path.parent).parts[0]
    except ValueError:
        return False
    # `out.jsonl.manifest.json`, `.out.jsonl/journal.jsonl`, `out.dropped.jsonl`
    stem = output_path.name.removesuffix(output_path.suffix)
    return sibling.removeprefix(".").startswith((f"{output_path.name}.", f"{stem}.")) or (
        sibling == f".{output_path.name}"
    )

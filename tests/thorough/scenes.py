"""What the scripts of this folder share: the JSON line, and what is left of a run's processes."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks" / "training")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil  # noqa: E402

from stillroom import api  # noqa: E402
from stillroom.run_folder import RunFolder, find_run  # noqa: E402
from stillroom.settings import Workspace  # noqa: E402

ORPHANS_AFTER_S = 10.0
ACTIVE = ("starting", "running")


def report(promise: int | str, figure: str, passed: bool, **more: Any) -> int:
    """Prints the line and returns the script's exit code."""
    line = {"promise": promise, "figure": figure, "passed": passed, **more}
    print(json.dumps(line), flush=True)
    return 0 if passed else 1


@contextmanager
def workspace() -> Iterator[Workspace]:
    """Yields an empty workspace, whose path marks the processes of its runs."""
    with tempfile.TemporaryDirectory(prefix="stillroom-trust-", ignore_cleanup_errors=True) as name:
        yield Workspace(Path(name).resolve())


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    """Returns whether the condition came to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_of(root: Path) -> list[psutil.Process]:
    """Returns all processes but this one that work in the folder or name it on their command line.

    The keeper of a run that has ended is none of its orphans only once it has ended too.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if str(root) in process.cwd() or str(root) in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def num_orphans(root: Path) -> int:
    """Returns how many processes of the folder live on after the time they have to end."""
    wait_for(lambda: not processes_of(root), ORPHANS_AFTER_S)
    left = processes_of(root)
    for process in left:
        print(f"left: {process} of {process.ppid()}: {process.cmdline()}", file=sys.stderr)
        process.kill()
    return len(left)


def training_project(root: Path, method: str, rank: int = 0) -> Any:
    """Returns a small project of benchmarks/training/kills.py, with its config written."""
    from kills import project_of

    project = project_of(root, method, rank, "llama")
    project.write_config()
    return project


def look(space: Workspace, run_id: str) -> api.RunReport:
    return api.get_run(space, api.GetRun(run_id=run_id))


def wait_for_end(space: Workspace, run_id: str, seconds: float = 120.0) -> api.RunReport:
    wait_for(lambda: look(space, run_id).status not in ACTIVE, seconds)
    return look(space, run_id)


def folder_of(space: Workspace, run_id: str) -> RunFolder:
    return find_run(space, run_id)

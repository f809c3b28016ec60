"""Runs curation as tasks on a Ray cluster; the driver joins the parts that they write, in order.

It does not use Ray Data, whose Arrow tables would add the fields of all other rows, as nulls, to a
row's tool schemas and arguments. Tasks over files copy the bytes unchanged, need neither pyarrow
nor pandas, and keep the order of the rows. Driver and workers must see the workspace under the same
path.
"""

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from stillroom import __version__
from stillroom.errors import EngineError, RunError
from stillroom.files import LineWriter
from stillroom.places import make_folder
from stillroom.rollout.ray.cluster import ray_cluster

_TASKS_PER_CPU = 2
"""The number of tasks per CPU that are in flight at once."""
_RETRIES = 2
"""The number of times that a task is retried if its worker dies; it then overwrites its part."""

Result = TypeVar("Result")
Tally = TypeVar("Tally")


@dataclass(frozen=True, slots=True)
class WrittenPart(Generic[Tally]):
    """A file of rows that one task has written, and the task's counts."""

    path: Path
    num_rows: int
    tally: Tally

    def append_to(self, rows: LineWriter) -> None:
        """Appends the rows to the output and deletes the file."""
        rows.append_file(self.path, num_rows=self.num_rows)
        self.path.unlink()


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to a Ray cluster, and the folder for the parts that its tasks write."""

    ray: Any
    folder: Path

    def path(self, number: int, kind: str = "part") -> Path:
        """Returns the path of the part that the task with this number writes."""
        return self.folder / f"{number:06d}.{kind}.jsonl"

    def map(self, work: Callable[..., Result], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Result]:
        """Yields the result of `work` for the arguments of each job, in order.

        Raises the EngineError of a failed task, and RunError for any other failure.
        """
        task = self.ray.remote(_run_checked).options(num_cpus=1, max_retries=_RETRIES)
        max_tasks = _TASKS_PER_CPU * max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        running: deque[Any] = deque()
        for job in jobs:
            running.append(task.remote(work, job, __version__))
            if len(running) >= max_tasks:
                yield self._result(running.popleft())
        while running:
            yield self._result(running.popleft())

    def _result(self, reference: Any) -> Any:
        """Returns a task's result. Raises its EngineError, or RunError for any other failure."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise error.cause from error
            raise RunError(
                f"a Ray task failed: {str(error.cause)[:500]}",
                "read the traceback in the worker's log (`ray list tasks` names the worker)",
            ) from error
        except self.ray.exceptions.RayError as error:
            raise RunError(
                f"Ray lost a task: {type(error).__name__}: {str(error)[:500]}",
                "read the worker's log (`ray list tasks` names the worker); if the worker ran out "
                "of memory, give workers more, or split the largest input file",
            ) from error


@contextmanager
def ray_session(address: str | None, output: Path) -> Generator[RaySession]:
    """Connects to a Ray cluster with a temporary folder for its tasks' output.

    The folder is next to the output, where all workers can write, and is removed on exit.
    """
    make_folder(output.parent)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.parts-", dir=output.parent))
    try:
        with ray_cluster(address) as ray:
            yield RaySession(ray, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_checked(work: Callable[..., Any], job: tuple[Any, ...], version: str) -> Any:
    """Calls `work` in a Ray worker. Raises RunError if the worker's version is not `version`."""
    if version != __version__:
        raise RunError(
            f"a Ray worker has stillroom {__version__}, but the driver has {version}",
            "install the same version on all nodes of the cluster",
        )
    return work(*job)

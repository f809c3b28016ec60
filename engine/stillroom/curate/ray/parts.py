"""Curation on a Ray cluster: each task takes one file, the driver puts the parts together in order.

Not Ray Data: its blocks are Arrow tables, in which a row's tool schemas and arguments get the
fields of all other rows, as nulls. Tasks over files copy the very bytes, need neither pyarrow nor
pandas, and keep the order of the rows. Driver and workers see the workspace under the same path.
"""

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stillroom import __version__
from stillroom.errors import EngineError, RunError
from stillroom.rollout.ray.cluster import ray_cluster

_AHEAD = 2
"""Tasks for each CPU that are on their way at once."""
_RETRIES = 2
"""Of a task whose worker dies: it writes its part anew."""

Job = TypeVar("Job")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class RayParts:
    """A cluster, and a folder for the parts that its tasks write."""

    ray: Any
    folder: Path

    def path(self, number: int, kind: str = "part") -> Path:
        """Returns where the task with this number writes."""
        return self.folder / f"{number:06d}.{kind}.jsonl"

    def each(self, work: Callable[[Job], Part], jobs: Iterable[Job]) -> Iterator[Part]:
        """Yields the results of `work` for each job, in the order of the jobs.

        Raises the first EngineError of a task, and RunError for any other fault.
        """
        task = self.ray.remote(_checked).options(num_cpus=1, max_retries=_RETRIES)
        room = _AHEAD * max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        for job in jobs:
            waiting.append(task.remote(work, job, __version__))
            if len(waiting) >= room:
                yield self._result(waiting.popleft())
        while waiting:
            yield self._result(waiting.popleft())

    def _result(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise error.cause from error
            raise RunError(
                f"a Ray task broke off: {str(error.cause)[:500]}",
                "the traceback is in the worker's log (`ray list tasks`)",
            ) from error
        except self.ray.exceptions.RayError as error:
            raise RunError(
                f"Ray lost a task: {type(error).__name__}: {str(error)[:500]}",
                "give workers more memory, or split the largest file",
            ) from error


@contextmanager
def ray_parts(address: str | None, output: Path) -> Generator[RayParts]:
    """Gives a cluster, and a folder beside the output that is removed when the work is done."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.parts-", dir=output.parent))
    try:
        with ray_cluster(address) as ray:
            yield RayParts(ray, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _checked(work: Callable[[Any], Any], job: Any, version: str) -> Any:
    if version != __version__:
        raise RunError(
            f"a Ray worker has stillroom {__version__}, the driver {version}",
            "install the same version everywhere",
        )
    return work(job)

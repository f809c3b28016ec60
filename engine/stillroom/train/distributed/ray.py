"""Starts the processes of a run on a Ray cluster, by Ray Train."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stillroom.errors import RunError
from stillroom.rollout.ray.cluster import ray_cluster
from stillroom.train.config.sections import LauncherSection
from stillroom.train.distributed.rank_folder import (
    RANK_MODULE,
    RankEnd,
    RankFiles,
    RanksFailedError,
    watch_owner,
)
from stillroom.train.student.collective import WAIT_S, Collective


def run_on_ray(
    files: RankFiles, section: LauncherSection, *, size: int, note: Callable[[str], None]
) -> None:
    """Trains on Ray Train's workers and waits for them.

    Raises RanksFailedError if a worker fails, RunError if no cluster responds.
    """
    with ray_cluster(section.address, num_cpus=size, key="launcher.address") as ray:
        train: Any = importlib.import_module("ray.train")
        torch_train: Any = importlib.import_module("ray.train.torch")
        resources: dict[str, float] = ray.cluster_resources()
        has_gpus = resources.get("GPU", 0) > 0
        kind = "GPU" if has_gpus else "CPU"
        if (num_units := int(resources.get(kind, 0))) < size:
            note(f"waiting for resources: the cluster has {num_units} {kind}s for {size} processes")
        backend = "nccl" if has_gpus else "gloo"
        trainer = torch_train.TorchTrainer(
            _train_on_worker,
            train_loop_config={"folder": str(files.folder)},
            scaling_config=train.ScalingConfig(num_workers=size, use_gpu=has_gpus),
            run_config=train.RunConfig(name="ray", storage_path=str(files.folder)),
            torch_config=torch_train.TorchConfig(backend=backend, timeout_s=WAIT_S),
        )
        try:
            trainer.fit()
        except train.TrainingFailedError as error:
            failures: dict[int, Exception] = getattr(error, "worker_failures", {})
            if not failures:
                raise RunError(
                    f"Ray Train failed: {_last_line(error)}",
                    "check the cluster with `ray status`; see the run's log for details",
                ) from error
            endings = {rank: f"was lost: {_last_line(failures[rank])}" for rank in sorted(failures)}
            raise RanksFailedError(endings) from error


def _train_on_worker(settings: dict[str, Any]) -> None:
    """Trains as one rank, in one of Ray Train's workers."""
    context = importlib.import_module("ray.train").get_context()
    device = importlib.import_module("ray.train.torch").get_device()
    files = RankFiles(Path(settings["folder"]))
    job = files.read_job()
    watch_owner(files, job.owner)
    rank, size = context.get_world_rank(), context.get_world_size()
    peers = Collective(rank, size, str(device), is_sharded=job.is_sharded)
    end: RankEnd = importlib.import_module(RANK_MODULE).train_as_rank(files, peers)
    if end.failure is not None:
        raise RuntimeError(end.failure.problem)


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300]

"""Work done by several processes that train together, forked from the test's own."""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stillroom.train.student.collective import Collective

_LIMIT_S = 60


def in_processes(
    work: Callable[[Collective], Any], folder: Path, *, size: int = 2, is_sharded: bool = False
) -> list[Any]:
    """Returns what `work` returns in each of the processes; fails the test if one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(work, folder, rank, size, is_sharded))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_LIMIT_S)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join(10)
    reported = [file.read_text("utf-8") for file in sorted(folder.glob("*.error"))]
    codes = [process.exitcode for process in processes]
    assert not reported, f"exit codes {codes}\n" + "\n".join(reported)
    assert not late, "the processes wait for each other"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(
    work: Callable[[Collective], Any], folder: Path, rank: int, size: int, is_sharded: bool
) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_LIMIT_S),
        )
        # Work that ends at once must not close a connection that another process is still making.
        dist.barrier()
        done = work(Collective(rank, size, is_sharded=is_sharded))
        torch.save(done, folder / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise

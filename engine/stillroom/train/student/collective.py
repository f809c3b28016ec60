"""The processes that train one model together: they divide rows, sum gradients, agree on values.

Every process must call the same methods in the same order, even one that has no rows of a batch:
a method waits for all of them. A process that trains alone takes the same path and sends nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")

WAIT_S = 2 * 3600
"""How long a process may wait for another, which samples or writes a checkpoint."""

# Smaller gradients are sent together: each message costs as much as many numbers.
_BUCKET_NUMBERS = 1 << 22


@dataclass(frozen=True, slots=True)
class Collective:
    """This process among those that train; `rank` 0 alone writes what a run leaves."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Where tensors must be to be sent."""
    is_sharded: bool = False
    """Whether each process holds its share of the weights only (FSDP2)."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes events, checkpoints and notes."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Returns each value summed over the processes; in float64."""
        if self.size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def largest(self, value: float) -> float:
        """Returns the largest of the processes' values."""
        return max(self.gathered(value))

    def is_any(self, flag: bool) -> bool:
        """Returns whether the flag is set in any process."""
        return self.sums(float(flag))[0] > 0

    def gathered(self, mine: T) -> list[T]:
        """Returns the value of each process, by rank; values are pickled on the way."""
        if self.size == 1:
            return [mine]
        gathered: list[T] = [mine] * self.size
        dist.all_gather_object(gathered, mine)
        return gathered

    def share(self, lengths: Sequence[int]) -> list[int]:
        """Returns the indices of the items that this process takes, in their order.

        lengths: those of all items. The longest first, each goes to the process that has least so
        far, so that all end a step at about the same time. Every process works out the same.
        """
        if self.size == 1:
            return list(range(len(lengths)))
        loads, mine = [0] * self.size, list[int]()
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            least = loads.index(min(loads))
            loads[least] += lengths[index]
            if least == self.rank:
                mine.append(index)
        return sorted(mine)

    def passes(self, groups: Iterable[list[int]]) -> list[list[int]]:
        """Returns this process's groups; where weights are sharded, with empty ones at the end.

        A forward pass over shards gathers weights from all processes, so all of them must make as
        many passes as the one that has most groups.
        """
        mine = list(groups)
        if not self.is_sharded:
            return mine
        return mine + [[] for _ in range(int(self.largest(len(mine))) - len(mine))]

    def copy_first(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies the first process's parameters to all others."""
        if self.size == 1 or self.is_sharded:
            return
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums the gradients over the processes; one that no process has stays None."""
        if self.size == 1:
            return
        if self.is_sharded:
            # FSDP's backward pass has formed their mean over the processes, not their sum.
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.size)
            return
        for bucket in _buckets(self._shared_gradients(parameters)):
            if len(bucket) == 1:
                dist.all_reduce(bucket[0])
                continue
            together = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(together)
            parts = together.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _shared_gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns the gradients that any process has; they are zeros where this one has none."""
        has = [float(parameter.grad is not None) for parameter in parameters]
        gradients: list[Tensor] = []
        for parameter, count in zip(parameters, self.sums(*has), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            gradients.append(parameter.grad)
        return gradients


ALONE = Collective()
"""The only process of a run."""


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the gradients in groups of one number format and of limited size."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        numbers = sum(tensor.numel() for tensor in bucket) + gradient.numel()
        if bucket and (numbers > _BUCKET_NUMBERS or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket

"""The processes that train one model together: split rows, sum gradients, agree on values.

Every process must call the same methods in the same order, even without rows of a batch: a method
waits for all of them. A process that trains alone uses the same code without communication.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from stillroom.models.placement import base_model

T = TypeVar("T")

WAIT_S = 2 * 3600
"""The timeout in seconds for another process, which may be sampling or writing a checkpoint."""

# Smaller gradients are sent together, because each message has an overhead.
_BUCKET_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Collective:
    """This process's rank among those that train together; rank 0 writes events and checkpoints."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """The device on which tensors are exchanged between processes."""
    is_sharded: bool = False
    """Whether weights and optimiser state are sharded (FSDP2)."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes events, checkpoints and notes."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Returns each value summed over the processes, in float64."""
        if self.size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def largest(self, value: float) -> float:
        """Returns the maximum over the processes."""
        return max(self.gathered(value))

    def is_any(self, flag: bool) -> bool:
        """Returns whether the flag is set in any process."""
        return self.sums(float(flag))[0] > 0

    def gathered(self, value: T) -> list[T]:
        """Returns the value of each process, by rank; values are pickled."""
        if self.size == 1:
            return [value]
        gathered: list[T] = [value] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def share(self, lengths: Sequence[int]) -> list[int]:
        """Returns the indices of the items that this process takes, in ascending order.

        lengths: the lengths of all items. Longest first, each item goes to the process with the
        smallest total so far, so that all processes end a step at about the same time. Every
        process computes the same split.
        """
        if self.size == 1:
            return list(range(len(lengths)))
        totals, share = [0] * self.size, list[int]()
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            least = totals.index(min(totals))
            totals[least] += lengths[index]
            if least == self.rank:
                share.append(index)
        return sorted(share)

    def passes(self, groups: Iterable[list[int]]) -> list[list[int]]:
        """Returns this process's groups, padded with empty groups if weights are sharded.

        With sharded weights a forward pass gathers from all processes, so all of them must make as
        many passes as the one with the most groups.
        """
        own = list(groups)
        return own + [[] for _ in range(self.num_missing_passes(len(own)))]

    def num_missing_passes(self, num_passes: int) -> int:
        """Returns how many more passes the busiest process makes; 0 unless weights are sharded."""
        return int(self.largest(num_passes)) - num_passes if self.is_sharded else 0

    def broadcast(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies the first process's parameters to all others."""
        if self.size == 1 or self.is_sharded:
            return
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums the gradients over the processes; a gradient that no process has stays None."""
        if self.size == 1:
            return
        if self.is_sharded:
            # FSDP's backward pass has computed the mean over the processes, not the sum.
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
        """Returns the gradients that any process has; this process's missing ones become zeros."""
        has_gradient = [float(parameter.grad is not None) for parameter in parameters]
        gradients: list[Tensor] = []
        for parameter, count in zip(parameters, self.sums(*has_gradient), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            gradients.append(parameter.grad)
        return gradients


ALONE = Collective()
"""The collective of a single-process run."""


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the gradients in groups of one dtype and limited size."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        num_elements = sum(tensor.numel() for tensor in bucket) + gradient.numel()
        if bucket and (num_elements > _BUCKET_ELEMENTS or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def shard(model: nn.Module, *, device: str, size: int) -> nn.Module:
    """Shards a causal language model's weights over the processes; returns the root module.

    The root is the model without an adapter's wrapper, and `root(compute)` returns
    `compute()`. The model is on the CPU; each process moves its shard to the device.
    """
    root = base_model(model)
    mesh = init_device_mesh(torch.device(device).type, (size,))
    for layer in root.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    root.forward = _run
    return root


def gathered_bytes(model: nn.Module) -> int:
    """Returns how many bytes of weights are gathered at once: a layer's, and those in no layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    outside_layers = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    return outside_layers + max(sizes, default=0)


def run_inside(root: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """Runs `compute` inside the forward pass of the root (see `shard`), and returns its result."""
    computed = root(compute)
    if not torch.is_grad_enabled():
        # The backward pass frees the gathered weights; without one they would stay gathered.
        cast("FSDPModule", root).reshard()
    return computed


def _run(compute: Callable[[], T]) -> T:
    """Replaces the forward pass of a sharded root (see `shard`)."""
    return compute()


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a sharded one; all processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_weights(module: nn.Module, *, is_trained_only: bool, is_kept: bool) -> dict[str, Tensor]:
    """Returns the full weights by name, on the CPU; tied weights stay one tensor.

    All processes must call this; {} in those that do not keep them.
    """
    # First, since reading the state dict frees gathered weights.
    tensors = module.state_dict(keep_vars=True)
    used = {id(t): t for t in tensors.values() if t.requires_grad or not is_trained_only}
    weights: dict[int, Tensor] = {}
    for key, tensor in used.items():
        full = full_tensor(tensor.detach())
        if is_kept:
            weights[key] = full.cpu()
    return {name: weights[id(tensor)] for name, tensor in tensors.items() if id(tensor) in weights}


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Returns this process's shard of a full tensor, if `example` is sharded."""
    if not isinstance(example, DTensor):
        return tensor
    placed = tensor.to(example.device)
    return distribute_tensor(placed, example.device_mesh, example.placements, src_data_rank=None)


@torch.no_grad()
def set_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Sets the module's sharded, trained parameters from full tensors, by name.

    Raises KeyError if a parameter's tensor is missing.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(shard_like(weights[name].to(parameter.dtype), parameter))

"""FSDP2: each process holds its share of every weight, and gathers a layer while that runs.

Weights outside the layers (the embeddings, the last norm, the output head) are gathered only while
the model's own forward pass runs. So the model's forward is replaced by one that calls a function,
and whatever needs those weights is called inside it (`run_inside`).
"""

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from stillroom.models.placement import base_model

T = TypeVar("T")


def shard(model: nn.Module, *, device: str, size: int) -> nn.Module:
    """Splits a causal language model's weights over the processes; returns the module to run in.

    That module, the root, is the model without an adapter's wrapper: `root(compute)` returns
    `compute()`. The model is in main memory; the share that a process keeps moves to the device.
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
    """Returns the bytes of weights that are whole at a time: one layer's, and those of no layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    rest = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    return rest + max(sizes, default=0)


def run_inside(root: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """Runs `compute` inside the forward pass of the root (see `shard`), and returns its result."""
    computed = root(compute)
    if not torch.is_grad_enabled():
        # The backward pass frees the gathered weights; without one they would stay gathered.
        cast("FSDPModule", root).reshard()
    return computed


def _run(compute: Callable[[], T]) -> T:
    return compute()


def whole(tensor: Tensor) -> Tensor:
    """Returns a sharded tensor as a whole one; all processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Returns this process's share of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_weights(module: nn.Module, *, is_trained_only: bool) -> dict[str, Tensor]:
    """Returns the weights by name, in main memory; tied weights stay one tensor."""
    # This comes first, since taking the state frees gathered weights.
    held = module.state_dict(keep_vars=True)
    weights: dict[int, Tensor] = {}
    for tensor in held.values():
        if id(tensor) not in weights and (tensor.requires_grad or not is_trained_only):
            weights[id(tensor)] = whole(tensor.detach()).cpu()
    return {name: weights[id(tensor)] for name, tensor in held.items() if id(tensor) in weights}


def like(tensor: Tensor, example: Tensor) -> Tensor:
    """Returns this process's share of a whole tensor, if `example` is such a share."""
    if not isinstance(example, DTensor):
        return tensor
    placed = tensor.to(example.device)
    return distribute_tensor(placed, example.device_mesh, example.placements, src_data_rank=None)


@torch.no_grad()
def set_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Sets the module's sharded, trained parameters from whole tensors, by name.

    Raises KeyError if a parameter's tensor is missing.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(like(weights[name].to(parameter.dtype), parameter))

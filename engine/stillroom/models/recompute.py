"""Gradient checkpointing: layers keep only their input and compute the rest again when needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stillroom.errors import ModelError


def recompute_layers(model: nn.Module) -> None:
    """Makes each of the model's layers compute its activations again in the backward pass.

    transformers' own switch works in training mode only, which would turn dropout on as well.
    Raises ModelError if the model has no layers that can do so.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that can be computed again",
            "set model.gradient_checkpointing: false, or use a model of another family",
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run

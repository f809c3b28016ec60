"""Holds Mamba layers to their least time step while they are sampled a token at a time."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_MARK = "stillroom_holds_time_step"


def hold_time_steps(model: nn.Module) -> None:
    """Makes Mamba layers keep to their least time step in single-token passes too.

    transformers bounds the time step in passes of several tokens only (Nemotron-H, Zamba2). The
    bound is put on what the time step is formed from, which changes nothing in the longer passes.
    """
    for mixer in model.modules():
        limits: Any = getattr(mixer, "time_step_limit", None)
        least = limits[0] if limits else 0.0
        projection: Any = getattr(mixer, "in_proj", None)
        if least > 0 and projection is not None and not hasattr(projection, _MARK):
            # The inverse of softplus.
            lowest = math.log(math.expm1(least))
            projection.register_forward_hook(partial(_bounded, mixer, lowest))
            setattr(projection, _MARK, True)


def _bounded(mixer: Any, lowest: float, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
    """Returns the projection with its last columns, one for each head, held to their bound."""
    bias_h = mixer.dt_bias
    rest, step = output.split([output.shape[-1] - bias_h.shape[0], bias_h.shape[0]], dim=-1)
    return torch.cat([rest, step.maximum((lowest - bias_h).to(step.dtype))], dim=-1)

"""Keeps the time steps of Mamba layers above their least, also where a model runs single tokens."""

import math
from typing import Any

import torch
from torch import Tensor, nn


def keep_time_steps(body: nn.Module) -> None:
    """Makes single tokens keep to the least time step that chunks of them keep to.

    The layers of Nemotron-H and Zamba 2 raise time steps to a least one, but transformers forgets
    it where they run one token. Raised before either of them looks, the steps are the same in both.
    """
    for module in body.modules():
        limits: Any = getattr(module, "time_step_limit", None)
        if not limits or not limits[0] > 0 or not hasattr(module, "dt_bias"):
            continue
        projection: Any = getattr(module, "in_proj", None)
        if projection is not None and not getattr(projection, "keeps_time_steps", False):
            projection.keeps_time_steps = True
            projection.register_forward_hook(_raising(module.dt_bias, float(limits[0])))


def _raising(bias_h: Tensor, least: float) -> Any:
    # softplus(x) is at least `least` if x is at least this.
    lowest = least + math.log(-math.expm1(-least))

    def raise_steps(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        # A layer's time steps, one for each head, come last.
        num_heads = len(bias_h)
        rest, steps = output[..., :-num_heads], output[..., -num_heads:]
        return torch.cat([rest, steps.maximum((lowest - bias_h).to(steps.dtype))], dim=-1)

    return raise_steps

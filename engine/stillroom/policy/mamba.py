"""Faster formulas for Mamba 2 layers during sampling, and exact time-step bounds.

Without installed kernels, transformers' own formulas repeat a head's scalars for every element and
state, and pad short texts to a whole chunk.

Shapes: B rows, T tokens of each, H heads in G groups that share B and C (keys and queries), P head
dimension, N state dimension; M = P * H / G, the heads of a group concatenated.
"""

import math
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

# The tokens of a chunk, in which each attends to every earlier one; a state is passed from chunk to
# chunk. Longer chunks cost more for each token, shorter ones need more operations.
_CHUNK_TOKENS = 64
# exp(-60) is negligible in any sum; much smaller values would be denormal, and slow on CPUs.
_MIN_LOG_DECAY = -60.0
_STEP_MARK = "stillroom_bounds_time_step"
_DISPATCH_MARK = "stillroom_dispatches_formulas"
_is_sampling: ContextVar[bool] = ContextVar("is_sampling", default=False)


@contextmanager
def fast_formulas() -> Generator[None]:
    """Makes the Mamba layers of prepared models use this module's formulas within the block."""
    token = _is_sampling.set(True)
    try:
        yield
    finally:
        _is_sampling.reset(token)


def prepare_mamba(model: nn.Module) -> None:
    """Prepares the Mamba layers of a model for sampling; training passes are unchanged."""
    for mixer in model.modules():
        _bound_time_step(mixer)
        # If mamba_ssm is installed, transformers uses its kernels, which are faster.
        if hasattr(mixer, "A_log") and find_spec("mamba_ssm") is None:
            module: Any = sys.modules[type(mixer).__module__]
            for name, fast in _FAST_FORMULAS.items():
                original = getattr(module, name, None)
                if original is not None and not hasattr(original, _DISPATCH_MARK):
                    setattr(module, name, _dispatch(original, fast))


def _dispatch(original: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs `fast` while a model is sampled, and `original` otherwise."""

    @wraps(original)
    def dispatching(*args: Any, **kwargs: Any) -> Any:
        return (fast if _is_sampling.get() else original)(*args, **kwargs)

    setattr(dispatching, _DISPATCH_MARK, True)
    return dispatching


def _bound_time_step(mixer: nn.Module) -> None:
    """Makes a Mamba layer respect its minimum time step in single-token passes too.

    transformers bounds the time step in passes of several tokens only (Nemotron-H, Zamba2). The
    bound is applied to the time step's input, which does not change longer passes.
    """
    limits: Any = getattr(mixer, "time_step_limit", None)
    min_step = limits[0] if limits else 0.0
    projection: Any = getattr(mixer, "in_proj", None)
    if min_step > 0 and projection is not None and not hasattr(projection, _STEP_MARK):
        # The inverse of softplus.
        min_input = math.log(math.expm1(min_step))
        projection.register_forward_hook(partial(_clamp_time_step, mixer, min_input))
        setattr(projection, _STEP_MARK, True)


def _clamp_time_step(
    mixer: Any, min_input: float, _module: Any, _inputs: Any, output: Tensor
) -> Tensor:
    """Returns the projection with its last columns, one for each head, clamped from below."""
    bias_h = mixer.dt_bias
    rest, step = output.split([output.shape[-1] - bias_h.shape[0], bias_h.shape[0]], dim=-1)
    return torch.cat([rest, step.maximum((min_input - bias_h).to(step.dtype))], dim=-1)


def _step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    **_: Any,
) -> Tensor:
    """Runs the SSM for one token per row ([B, H, P]) and updates the state ([B, H, P, N]) in place.

    The arguments are those of transformers' `mamba2_selective_state_update`, where the values of a
    head (dt, A, D, dt_bias) are repeated for each of its elements.
    """
    rows, heads, head_dim = hidden_states.shape
    groups, state_size = B.shape[1:]
    x_BHP = hidden_states.float()
    dt_BH = softplus((dt[..., 0] + dt_bias[:, 0].to(dt.dtype)).float())
    state.mul_((dt_BH * A[:, 0, 0]).clamp_(min=_MIN_LOG_DECAY).exp_()[..., None, None])
    state_MN = state.view(rows * groups, -1, state_size)
    added = (x_BHP * dt_BH[..., None]).view(rows * groups, -1, 1)
    state_MN.addcmul_(added, B.reshape(rows * groups, 1, state_size).float())
    # C is the left operand: with the state on the left, the matmul is six times slower on a CPU.
    y = C.reshape(rows * groups, 1, state_size).float() @ state_MN.mT
    return (y.view(rows, heads, head_dim) + x_BHP * D).to(hidden_states.dtype)


def _scan(  # noqa: PLR0913
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    initial_states: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Runs the SSM for several tokens per row; returns outputs ([B, T, H, P]) and the new state.

    The arguments are those of transformers' `mamba2_chunk_scan`.
    """
    rows, heads, head_dim = hidden_states.shape[0], *hidden_states.shape[2:]
    groups, state_size = B.shape[2:]
    dt_BTH = softplus((dt + dt_bias.to(dt.dtype)).float()).clamp_(*dt_limit)
    x_BTHP = hidden_states.float()
    shape = (rows, groups, heads // groups * head_dim, state_size)
    state_BGMN = (
        x_BTHP.new_zeros(shape) if initial_states is None else initial_states.float().view(shape)
    )
    parts: list[Tensor] = []
    each = (x_BTHP, dt_BTH, B.float(), C.float())
    for x, step, key, query in zip(*(t.split(_CHUNK_TOKENS, dim=1) for t in each), strict=True):
        y, state_BGMN = _scan_chunk(x * step[..., None], step * A, key, query, state_BGMN)
        parts.append(y)
    output = torch.cat(parts, dim=1) + x_BTHP * D[:, None]
    return output, state_BGMN.view(rows, heads, head_dim, state_size)


def _scan_chunk(
    x_BTHP: Tensor, log_decay_BTH: Tensor, key_BTGN: Tensor, query_BTGN: Tensor, state_BGMN: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of one chunk ([B, T, H, P]) and the state after it ([B, G, M, N]).

    log_decay_BTH: the logarithm of each token's decay factor for the state, at most 0.
    """
    rows, tokens, heads, head_dim = x_BTHP.shape
    groups = key_BTGN.shape[2]
    key_BGTN, query_BGTN = key_BTGN.transpose(1, 2), query_BTGN.transpose(1, 2)
    # The factor by which each token has decayed at a later one. Each is summed on its own, as the
    # difference of two sums over the chunk would be inexact where decays are large.
    log_decay_BHT = log_decay_BTH.mT
    between = log_decay_BHT[..., None].expand(-1, -1, -1, tokens).tril(-1).cumsum(-2)
    decay_BHTT = between.clamp_(min=_MIN_LOG_DECAY).exp_()
    weights = (
        decay_BHTT.view(rows, groups, -1, tokens, tokens) * (query_BGTN @ key_BGTN.mT)[:, :, None]
    )
    within_BHTP = weights.tril_().view(rows, heads, tokens, tokens) @ x_BTHP.transpose(1, 2)
    from_state = (query_BGTN @ state_BGMN.mT).view(rows, groups, tokens, -1, head_dim)
    since_BTH = log_decay_BHT.cumsum(-1).clamp_(min=_MIN_LOG_DECAY).exp_().mT
    y_BTHP = (
        from_state.transpose(1, 2).reshape(rows, tokens, heads, head_dim) * since_BTH[..., None]
    )
    y_BTHP = y_BTHP.add_(within_BHTP.transpose(1, 2))
    added = (x_BTHP * decay_BHTT[:, :, -1].mT[..., None]).view(rows, tokens, groups, -1)
    kept = since_BTH[:, -1].reshape(rows, groups, -1, 1, 1)
    state = (state_BGMN.view(rows, groups, kept.shape[2], head_dim, -1) * kept).view_as(state_BGMN)
    return y_BTHP, state + added.permute(0, 2, 3, 1) @ key_BGTN


_FAST_FORMULAS: dict[str, Callable[..., Any]] = {
    "mamba2_selective_state_update": _step,
    "mamba2_chunk_scan": _scan,
}

"""Device placement: the best available device, or layers spread over the GPUs and the CPU; also
gradient checkpointing.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stillroom.errors import ConfigError, ModelError, missing_extra
from stillroom.models.precision import Precision, Quantization


def best_device() -> torch.device:
    """Returns the device that models run on: CUDA, else an Apple GPU (mps), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def dtype_for(precision: Precision, device: torch.device) -> torch.dtype:
    """Returns the dtype: `auto` is bf16 on CUDA, and fp32 on a CPU or an Apple GPU.

    Raises ConfigError for bf16 on an Apple GPU whose macOS does not support it.
    """
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if precision == "bf16" and device.type == "mps" and not _has_apple_bf16():
        raise ConfigError(
            "precision bf16 needs macOS 14 or later on an Apple GPU",
            "set precision: fp32, or update macOS",
        )
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def check_options(device: torch.device, *, quantization: Quantization, spread: bool) -> None:
    """Raises ConfigError if the device is an Apple GPU and an option needs CUDA."""
    if device.type != "mps":
        return
    cuda_options = {"quantization: nf4": quantization is not None, "spread: true": spread}
    if unsupported := [option for option, is_set in cuda_options.items() if is_set]:
        raise ConfigError(
            f"an Apple GPU (mps) does not support {' and '.join(unsupported)}",
            f"remove {' and '.join(unsupported)}; to save memory, set precision: bf16",
        )


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in float64, on the CPU if it was on an Apple GPU, which has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _has_apple_bf16() -> bool:
    return torch.backends.mps.is_macos_or_newer(14, 0)


def spread_options() -> dict[str, Any]:
    """Returns the `from_pretrained` options that spread a model's layers over all GPUs.

    Layers that do not fit stay in CPU memory, and are copied to a GPU whenever they run.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise missing_extra("train", "teacher.spread")
    return {"device_map": "auto"}


def base_model(model: Any) -> Any:
    """Returns the model, or the one that a peft model wraps.

    peft puts an adapter into the layers of its base in place, so the returned model runs it too.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: Any) -> Any:
    """Returns the layers of a causal language model without its output head.

    They take token ids and return hidden states.
    """
    base = base_model(model)
    body = base.get_decoder()
    # For a body under an unusual name (Llama 4), transformers returns the model itself.
    return base.model if body is base else body


def input_device(model: Any) -> torch.device:
    """Returns the device that a model's inputs must be on."""
    # accelerate adds hooks to a spread model, which hold the device that each layer runs on.
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        return model.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Enables gradient checkpointing: layers recompute activations in the backward pass.

    transformers' own switch works in training mode only, which would also turn dropout on.
    Raises ModelError if the model does not support it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing",
            "set model.gradient_checkpointing: false, or use a model of another family",
        )
    for layer in layers:
        layer.forward = _checkpoint_forward(layer.forward)


def _checkpoint_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `forward` with checkpointing whenever gradients are enabled."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run

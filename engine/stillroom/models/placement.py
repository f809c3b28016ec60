"""Places models: on the best device at hand, or spread over the GPUs and main memory; and has their
layers recompute what is not kept (gradient checkpointing).
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
    """Returns the number format: `auto` is bf16 on CUDA, and fp32 on a CPU or an Apple GPU.

    Raises ConfigError for bf16 on an Apple GPU whose system does not have it.
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
    """Raises ConfigError for options that need CUDA, on an Apple GPU."""
    if device.type != "mps":
        return
    named = {"quantization: nf4": quantization is not None, "spread: true": spread}
    if needing := [option for option, is_set in named.items() if is_set]:
        raise ConfigError(
            f"{' and '.join(needing)} cannot be used on an Apple GPU (mps)",
            "leave it out; precision: bf16 needs half the memory of fp32",
        )


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in float64, which Apple GPUs lack: their tensors come to main memory."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _has_apple_bf16() -> bool:
    return torch.backends.mps.is_macos_or_newer(14, 0)


def spread_options() -> dict[str, Any]:
    """Returns the options of `from_pretrained` that spread a model's layers over all GPUs.

    Layers that do not fit stay in main memory, and are copied to a GPU whenever they run.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise missing_extra("train", "teacher.spread")
    return {"device_map": "auto"}


def base_model(model: Any) -> Any:
    """Returns the model itself; of a peft model the one that it wraps, which runs the adapter too.

    A peft model puts its adapter into the layers of its base in place.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: Any) -> Any:
    """Returns the layers of a causal language model without its output head.

    They take token ids and return hidden states.
    """
    base = base_model(model)
    body = base.get_decoder()
    # Where a family names its body in an unusual way (Llama 4), transformers returns the model.
    return base.model if body is base else body


def input_device(model: Any) -> torch.device:
    """Returns the device that a model's inputs must be on."""
    # accelerate puts hooks on a spread model, which hold the device that each layer runs on.
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        return model.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


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

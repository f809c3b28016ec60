"""Places a model's layers: all on one device, or spread over the GPUs and main memory."""

import importlib.util
from typing import Any

import torch

from stillroom.errors import missing_extra


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

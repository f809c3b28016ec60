"""Where a model's layers are: all on one device, or spread over what the machine has."""

import importlib.util
from typing import Any

import torch

from stillroom.errors import missing_extra


def spread_options() -> dict[str, Any]:
    """Returns what `from_pretrained` needs to spread layers over all GPUs.

    What does not fit there stays in main memory, and is brought to a GPU where it is needed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise missing_extra("train", "teacher.spread")
    return {"device_map": "auto"}


def input_device(model: Any) -> torch.device:
    """Returns where a model's inputs must be."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is None:
        return model.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

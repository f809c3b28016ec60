"""The tensors of a run that goes on bit for bit: optimiser and random numbers, beside the weights.

Only safetensors are written and read, so a checkpoint of somebody else's runs no code.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stillroom.errors import ModelError
from stillroom.models.load import read_weights
from stillroom.models.resolve import ModelLocation
from stillroom.train.student import Student

TENSORS = "training_state.safetensors"
_CPU_RANDOM, _CUDA_RANDOM, _OPTIMIZER = "random.cpu", "random.cuda", "optimizer."


def save_snapshot(folder: Path, optimizer: dict[str, Tensor]) -> None:
    """Writes the optimiser's tensors and the random numbers' state into a checkpoint's folder."""
    tensors = {_OPTIMIZER + name: tensor.contiguous() for name, tensor in optimizer.items()}
    tensors[_CPU_RANDOM] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors[_CUDA_RANDOM] = torch.cuda.get_rng_state()
    save_file(tensors, folder / TENSORS)


def restore_snapshot(folder: Path) -> dict[str, Tensor]:
    """Sets the random numbers as they were and returns the optimiser's tensors."""
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the checkpoint {folder} cannot be gone on from: {error}",
            f"delete {folder.name}, and the checkpoint before it is taken",
        ) from error
    torch.set_rng_state(tensors[_CPU_RANDOM])
    if torch.cuda.is_available() and _CUDA_RANDOM in tensors:
        torch.cuda.set_rng_state(tensors[_CUDA_RANDOM])
    return {
        name.removeprefix(_OPTIMIZER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_OPTIMIZER)
    }


def restore_weights(student: Student, folder: Path) -> None:
    """Gives the student the trained weights of a checkpoint, in place."""
    module: Any = student.module
    if student.is_adapter:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(module, load_file(folder / "adapter_model.safetensors"))
        return
    location = ModelLocation(folder.name, str(folder), is_local=True)
    module.load_state_dict(read_weights(location, dtype=module.dtype).state_dict())

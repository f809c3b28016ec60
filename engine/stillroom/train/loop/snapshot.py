"""The tensors of a run that goes on bit for bit: optimiser and random numbers, beside the weights.

Only safetensors are written and read, so a checkpoint of somebody else's runs no code.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stillroom.errors import ModelError
from stillroom.models.load import read_weights
from stillroom.models.resolve import ModelLocation
from stillroom.train.student.model import Student
from stillroom.train.student.sharding import set_weights

TENSORS = "training_state.safetensors"
_CPU_RANDOM, _CUDA_RANDOM, _OPTIMIZER = "random.cpu", "random.cuda", "optimizer."


def random_state() -> dict[str, Tensor]:
    """Returns the state of this process's random numbers."""
    state = {_CPU_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_CUDA_RANDOM] = torch.cuda.get_rng_state()
    return state


def save_snapshot(
    folder: Path, optimizer: Mapping[str, Tensor], random: Sequence[Mapping[str, Tensor]]
) -> None:
    """Writes the optimiser's tensors and each process's random numbers into a checkpoint."""
    tensors = {_OPTIMIZER + name: tensor.contiguous() for name, tensor in optimizer.items()}
    for rank, state in enumerate(random):
        tensors |= {_of_rank(name, rank): tensor for name, tensor in state.items()}
    save_file(tensors, folder / TENSORS)


def restore_snapshot(folder: Path, *, rank: int = 0) -> dict[str, Tensor]:
    """Sets a process's random numbers as they were and returns the optimiser's tensors."""
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the checkpoint {folder} cannot be gone on from: {error}",
            f"delete {folder.name}, and the checkpoint before it is taken",
        ) from error
    # A process more than there were keeps the numbers that it began with.
    if (state := tensors.get(_of_rank(_CPU_RANDOM, rank))) is not None:
        torch.set_rng_state(state)
    if (
        torch.cuda.is_available()
        and (state := tensors.get(_of_rank(_CUDA_RANDOM, rank))) is not None
    ):
        torch.cuda.set_rng_state(state)
    return {
        name.removeprefix(_OPTIMIZER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_OPTIMIZER)
    }


def _of_rank(name: str, rank: int) -> str:
    return name if rank == 0 else f"{name}.{rank}"


def restore_weights(student: Student, folder: Path) -> None:
    """Gives the student the trained weights of a checkpoint, in place."""
    module: Any = student.module
    if student.is_adapter:
        adapter = load_file(folder / "adapter_model.safetensors")
        if student.root is not None:
            names = {name: name.replace(".default", "") for name, _ in module.named_parameters()}
            set_weights(module, {n: adapter[key] for n, key in names.items() if key in adapter})
            return
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(module, adapter)
        return
    location = ModelLocation(folder.name, str(folder), is_local=True)
    weights = read_weights(location, dtype=module.dtype).state_dict()
    if student.root is not None:
        set_weights(module, weights)
        return
    module.load_state_dict(weights)

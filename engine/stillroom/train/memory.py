"""How much memory this process has taken at most."""

import resource
import sys

import torch


def peak_memory_gb(device: torch.device) -> float:
    """Returns the most memory held so far (GB): on CUDA the GPU's, else the whole process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

"""The peak memory of this process."""

import re
import resource
import sys
from pathlib import Path

import torch


def peak_memory_gb(device: torch.device) -> float:
    """Returns the most memory held so far (GB): on a GPU the GPU's, else the whole process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage, whose peak includes the memory of the process that started this one.
        [kilobytes] = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text("ascii"), re.MULTILINE)
        return int(kilobytes) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

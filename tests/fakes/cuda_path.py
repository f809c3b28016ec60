"""What training does on CUDA, on a processor: all but the GPU's own kernel of attention."""

import pytest
import torch

from fakes.varlen import varlen_attn
from stillroom.models.kernels import KernelChoice


def train_as_on_cuda(
    patch: pytest.MonkeyPatch, *, computes_in: torch.dtype = torch.float16
) -> None:
    """Has students compute under autocast, pack for one kernel call, and use autograd throughout.

    A GPU computes in bf16. Tests take fp16, which rounds less, to see more.
    """
    patch.setattr("stillroom.models.kernels._varlen_attention", lambda: varlen_attn)
    patch.setattr("stillroom.models.probe.choose_kernel", lambda *_: KernelChoice("varlen"))
    patch.setattr("stillroom.models.heads.matrix_head", lambda *_args, **_more: None)
    patch.setattr("stillroom.train.student.model.computing_format", lambda *_: computes_in)

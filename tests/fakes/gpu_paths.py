"""What training does on a GPU, on a processor: all but the GPU's own kernels."""

import pytest
import torch

from fakes.tiny_models import TinyModels
from fakes.varlen import varlen_attn
from stillroom.models.kernels import KernelChoice, choose_kernel
from stillroom.train.student.model import autocast_dtype


def train_as_on_cuda(
    patch: pytest.MonkeyPatch, *, compute_dtype: torch.dtype = torch.float16
) -> None:
    """Has students compute under autocast, pack for one kernel call, and use autograd throughout.

    A GPU computes in bf16. Tests take fp16, which rounds less, to see more.
    """
    _load_anew(patch)
    patch.setattr("stillroom.models.kernels._varlen_attention", lambda: varlen_attn)
    patch.setattr("stillroom.models.probe.choose_kernel", lambda *_: KernelChoice("varlen"))
    patch.setattr("stillroom.models.lm_head.matrix_head", lambda *_args, **_more: None)
    patch.setattr("stillroom.train.student.model.autocast_dtype", lambda *_: compute_dtype)


def train_as_on_an_apple_gpu(patch: pytest.MonkeyPatch) -> None:
    """Has students make the choices of an Apple GPU, and use autograd throughout."""
    _load_anew(patch)
    mps = torch.device("mps")
    patch.setattr(
        "stillroom.models.probe.choose_kernel", lambda _device, dtype: choose_kernel(mps, dtype)
    )
    patch.setattr("stillroom.models.lm_head.matrix_head", lambda *_args, **_more: None)
    patch.setattr(
        "stillroom.train.student.model.autocast_dtype",
        lambda _device, precision: autocast_dtype(mps, precision),
    )


def _load_anew(patch: pytest.MonkeyPatch) -> None:
    """Keeps tests from getting copies of models that were loaded as for a processor."""
    patch.setattr(TinyModels, "copy_of", lambda _self, _key, load: load())

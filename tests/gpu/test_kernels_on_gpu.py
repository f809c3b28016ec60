"""The kernel that packs take on CUDA computes what torch's attention does span by span."""

import pytest
import torch

from fakes.families import build_family
from stillroom.models import kernels
from stillroom.models.kernels import KernelCheck, Pack, PackSpan
from stillroom.models.lm_head import HeadRunner
from stillroom.models.probe import choose_passes

pytestmark = pytest.mark.gpu

ALONE = [PackSpan(150), PackSpan(1), PackSpan(700)]
SHARED = [PackSpan(300), PackSpan(40, (0,)), PackSpan(90, (0, 1)), PackSpan(1, (0,)), PackSpan(64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 2, 8, 100, 5000])
@pytest.mark.parametrize("spans", [ALONE, SHARED], ids=["alone", "shared"])
def test_output_and_gradients_are_those_of_spans(dtype, size, window, spans):
    if kernels._varlen_attention() is None:
        pytest.skip("this torch has no variable-length attention with windows")
    pack, check = Pack(spans), KernelCheck(dtype)
    draw = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(1, heads, sum(pack.lengths), size, device="cuda", generator=draw)
        for heads in (8, 2, 2)
    ]

    check.compare(pack, inputs, window=window, scale=None)

    assert 0 < check.gap < 2e-2


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo3"])
def test_a_model_in_bf16_packs_without_padding(family):
    head = HeadRunner(build_family(family).to("cuda"))

    choose_passes(head, compute_dtype=torch.bfloat16)

    assert head.rules.kernel == "varlen"
    assert head.can_pack

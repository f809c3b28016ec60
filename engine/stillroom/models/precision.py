"""The number formats a model may be loaded in: fp32, bf16, and 4 bits (nf4) under an adapter.

Needs no torch until a model is loaded, so that the server can check configurations.
"""

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from stillroom.errors import missing_extra

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "fp32", "bf16"]
"""`auto` is bf16 on CUDA, and fp32 on a CPU or an Apple GPU."""

Quantization = Literal["nf4"] | None
"""nf4: 4 bits for each weight of the frozen layers on which an adapter is trained."""


def check_quantization() -> None:
    """Raises MissingExtraError if bitsandbytes, which loads models in nf4, is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise missing_extra("qlora", "model.quantization nf4")


def nf4_options(dtype: "torch.dtype", device: "torch.device") -> dict[str, Any]:
    """Returns the options of `from_pretrained` that load linear layers in nf4.

    The layers compute in `dtype`; embeddings, norms and the output head stay in `dtype`.
    Source: Dettmers et al. 2023 (QLoRA), with its second quantisation of the scales.
    """
    check_quantization()
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
        # Each weight is quantised as it is moved to its device, since the whole model may not fit
        # there.
        "device_map": {"": str(device)},
    }


def compute_alike(model: Any) -> None:
    """Makes quantised layers compute the same with and without gradients.

    On some processors bitsandbytes computes in bf16 whenever gradients are disabled: sampling and
    the reference of DPO would then run a different model from the one that is trained.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False

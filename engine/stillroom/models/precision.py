"""The dtypes that a model may be loaded in: fp32, bf16, and 4 bits (nf4) under an adapter.

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
"""nf4: 4 bits for each weight of the frozen layers under an adapter."""


def check_quantization() -> None:
    """Raises MissingExtraError if bitsandbytes, which loads models in nf4, is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise missing_extra("qlora", "model.quantization nf4")


def nf4_options(dtype: "torch.dtype", device: "torch.device") -> dict[str, Any]:
    """Returns the `from_pretrained` options that load linear layers in nf4.

    The layers compute in `dtype`; embeddings, norms and the output head stay in `dtype`.
    Source: Dettmers et al. 2023 (QLoRA), with double quantisation of the scales.
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
        # Each weight is quantised as it is moved, since the whole model may not fit on the device.
        "device_map": {"": str(device)},
    }


def disable_bf16_inference(model: Any) -> None:
    """Makes quantised layers compute identically with and without gradients.

    On some CPUs bitsandbytes computes in bf16 whenever gradients are disabled: sampling and DPO's
    reference would then run a different model from the one being trained.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False

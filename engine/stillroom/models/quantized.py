"""Loading a model's layers in 4 bits (nf4), as the frozen base of an adapter.

Needs no torch until it loads, so the server checks it.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from stillroom.errors import missing_extra

if TYPE_CHECKING:
    import torch


def check_quantization() -> None:
    """Raises MissingExtraError if nothing here can quantise."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise missing_extra("qlora", "model.quantization nf4")


def nf4_options(dtype: "torch.dtype", device: "torch.device") -> dict[str, Any]:
    """Returns what `from_pretrained` needs to load linear layers in nf4.

    They compute in `dtype`; embeddings, norms and the output head stay in it.
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
        # Quantised as it is put there, so that it never stands in memory as a whole.
        "device_map": {"": str(device)},
    }


def compute_alike(model: Any) -> None:
    """Makes quantised layers compute the same with and without gradients.

    On some processors bitsandbytes would pass over to bf16 whenever no gradient is taken: what is
    sampled and the reference would then be another model's than the one that is trained.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False

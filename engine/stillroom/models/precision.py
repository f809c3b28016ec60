"""The number formats a model may be loaded in; needs no torch, so configurations can name them."""

from typing import Literal

Precision = Literal["auto", "fp32", "bf16"]
"""`auto` is bf16 on CUDA and fp32 on CPU."""

Quantization = Literal["nf4"] | None
"""nf4: 4 bits a weight in the layers that an adapter is trained on."""

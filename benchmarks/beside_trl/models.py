"""The models that both sides train: of a few shapes, with random weights, and adapters of them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stillroom.demo import DEMO_MODELS

SHAPES = {
    "32k": {
        "vocab_size": 32_768, "hidden_size": 384, "intermediate_size": 1152,
        "num_hidden_layers": 9, "num_attention_heads": 6,
    },
    "152k": {
        "vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 4,
    },
    # As Qwen2.5-0.5B, the smallest model of its vocabulary.
    "0.5B": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14,
    },
}  # fmt: skip
RANK = 16


def save_model(shape: str, folder: Path, *, seed: int, **more: Any) -> None:
    """Writes a model with random weights, the same for the same seed, and the demo's tokenizer."""
    config = Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in DEMO_MODELS["demo/student"].iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, folder)


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapter(*, is_lora: bool) -> Any:
    from peft import LoraConfig

    if not is_lora:
        return None
    return LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )


@torch.no_grad()
def draw_adapter(model: Any) -> None:
    """Gives an adapter the same weights on both sides."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" in name:
            bound = parameter.shape[1] ** -0.5
            parameter.uniform_(-bound, bound, generator=draw)

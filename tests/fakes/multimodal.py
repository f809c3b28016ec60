"""Tiny multimodal checkpoints with random weights, laid out as their makers publish them.

The text parts are the tiny models of fakes.families. Importing this module loads neither torch nor
transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.families import build_config

IMAGE, VIDEO, START, END, AUDIO = 21, 22, 23, 24, 25
"""Ids of tokens that stand for pictures and sound; no text of the tests has them."""


@dataclass(frozen=True, slots=True)
class Multimodal:
    """How a family's tiny multimodal model is made."""

    text: str
    """The name in fakes.families of the text part."""
    vision: Mapping[str, Any]
    settings: Mapping[str, Any]
    """The configuration's settings beside those of its parts."""
    text_settings: Mapping[str, Any] = field(default_factory=dict)
    """The text part's settings that differ from those of the tiny text model."""
    pixels: Mapping[str, Any] = field(default_factory=dict)
    """The inputs of one picture: shapes of random tensors, or values."""


_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.3,
}
_QWEN_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.3,
}
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_IDS: dict[str, Any] = {
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
}
_GEMMA_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "audio_token_id": AUDIO,
    "boi_token_id": START,
    "eoi_token_id": END,
}
_MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_PIXELS: dict[str, Any] = {"pixel_values": (1, 3, 28, 28)}
_QWEN_PIXELS: dict[str, Any] = {"pixel_values": (16, 96), "image_grid_thw": [[1, 4, 4]]}

FAMILIES: dict[str, Multimodal] = {
    "qwen3_5": Multimodal(
        "qwen3.5",
        {**_QWEN_VISION, "num_position_embeddings": 16},
        _QWEN_IDS,
        {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        _QWEN_PIXELS,
    ),
    "qwen3_5_moe": Multimodal(
        "qwen3.5-moe",
        {**_QWEN_VISION, "num_position_embeddings": 16},
        _QWEN_IDS,
        {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        _QWEN_PIXELS,
    ),
    "qwen3_vl": Multimodal(
        "qwen3",
        {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {**_QWEN_IDS, "tie_word_embeddings": True},
        {"model_type": "qwen3_vl_text", "rope_parameters": _MROPE},
        _QWEN_PIXELS,
    ),
    "qwen2_5_vl": Multimodal(
        "qwen2.5",
        {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [0]},
        _QWEN_IDS,
        {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {k: v for k, v in _MROPE.items() if k != "mrope_interleaved"},
        },
        _QWEN_PIXELS,
    ),
    "gemma3": Multimodal(
        "gemma3",
        {**_VISION, "model_type": "siglip_vision_model"},
        {**_IDS, "mm_tokens_per_image": 4},
        pixels=_PIXELS,
    ),
    "gemma3n": Multimodal("gemma3n", {"hidden_size": 16}, _GEMMA_IDS),
    "gemma4": Multimodal(
        "gemma4",
        {
            **{name: value for name, value in _VISION.items() if name != "image_size"},
            "patch_size": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        {**_GEMMA_IDS, "video_token_id": VIDEO, "audio_config": None},
        {"use_bidirectional_attention": "vision"},
        {
            "pixel_values": (1, 16, 48),
            "image_position_ids": [[[x, y] for y in range(4) for x in range(4)]],
        },
    ),
    "mistral3": Multimodal(
        "ministral3",
        {**_VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 56},
        {"image_token_index": IMAGE, "spatial_merge_size": 2, "tie_word_embeddings": False},
        pixels={"pixel_values": (1, 3, 56, 56), "image_sizes": [[56, 56]]},
    ),
    "llama4": Multimodal(
        "llama4",
        {
            **_VISION,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        _IDS,
        pixels=_PIXELS,
    ),
}
"""From transformers' name of a multimodal type to how its tiny model is made."""


def build_whole_config(name: str, tokenizer: Any = None, **changes: Any) -> Any:
    """Returns the configuration of a tiny multimodal model; `changes` go into its text part's."""
    from transformers import AutoConfig

    shape = FAMILIES[name]
    text = {**build_config(shape.text, tokenizer, **changes).to_dict(), **shape.text_settings}
    settings: dict[str, Any] = {"text_config": text, "vision_config": dict(shape.vision)}
    # A copy, because configurations change what they are given.
    return AutoConfig.for_model(name, **json.loads(json.dumps({**settings, **shape.settings})))


def save_multimodal(
    root: Path, name: str, *, seed: int = 0, template: str = "chatml", **changes: Any
) -> Path:
    """Saves a tiny multimodal model, tokenizer and processor, unless it is there already.

    changes: settings of the text part. Returns its folder.
    """
    from fakes.tiny_models import build_tokenizer

    folder = root / f"{name}-{template}-{seed}"
    if folder.exists():
        return folder
    tokenizer = build_tokenizer(template)
    config = build_whole_config(name, tokenizer, **changes)
    if name == "gemma3n":
        _save_without_towers(folder, config, seed=seed)
    else:
        build_whole(config, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 28}}', encoding="utf-8")
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}', encoding="utf-8")
    return folder


def build_whole(config: Any, *, seed: int = 0) -> Any:
    """Returns a multimodal model with random weights, in fp32 and evaluation mode."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def _save_without_towers(folder: Path, config: Any, *, seed: int) -> None:
    """Saves a text part with stand-ins for towers that need packages of their own to be built."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    text = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=torch.float32)
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for name, tensor in text.state_dict().items()
        if name != "lm_head.weight"
    }
    for part in ("vision_tower.blocks.0", "audio_tower.conformer.0"):
        weights[f"model.{part}.weight"] = torch.randn(4, 4)
    folder.mkdir(parents=True)
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.dtype = "float32"
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def picture(name: str) -> dict[str, Any]:
    """Returns the tensors of a random picture, as a family's processor makes them."""
    import torch

    torch.manual_seed(0)
    return {
        key: torch.randn(value) if isinstance(value, tuple) else torch.tensor(value)
        for key, value in FAMILIES[name].pixels.items()
    }

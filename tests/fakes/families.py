"""Tiny decoders of every family of transformers that people distil into, with random weights.

Each has the layers of every type that its family mixes, and windows, chunks and original contexts
so small that sequences of some dozens of tokens lie on both sides of them. Importing this module
loads neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WINDOW, CHUNK, ORIGINAL_CONTEXT, DELTA_CHUNK = 8, 16, 24, 64
"""Tokens: of a sliding window; of a chunk of Mamba or of chunked attention; before RoPE is
stretched; and of a chunk of the gated delta rule, which transformers fixes."""
VOCABULARY = 352


@dataclass(frozen=True, slots=True)
class FamilyShape:
    """How a family's tiny model is made."""

    title: str
    """The family's name for people."""
    config_class: str
    """The name of the class of its configuration in transformers."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The configuration's settings that differ from `_SIZES`; None leaves one of those out."""
    boundaries: tuple[int, ...] = ()
    """Lengths in tokens past which the model computes in another way."""
    is_recurrent: bool = False
    """Whether some layers keep a state instead of keys and values."""
    is_moe: bool = False
    """Whether some layers route tokens to experts."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in tokens at, before and after each boundary, and far beyond the last."""
        near = {edge + step for edge in self.boundaries for step in (-1, 0, 1)}
        return tuple(sorted({5, 2 * max(self.boundaries, default=12) + 5, *near}))


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_FOUR: dict[str, Any] = {"num_hidden_layers": 4}
_HEAD: dict[str, Any] = {"head_dim": 8}
_NO_ATTENTION: dict[str, Any] = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
)
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DELTA: dict[str, Any] = {
    **_HEAD,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_GEMMA: dict[str, Any] = {
    **_HEAD,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_ALTERNATING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": CHUNK,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 512 / ORIGINAL_CONTEXT,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 6.0, 12.0],
}


def _recurrent(
    title: str, config_class: str, settings: Mapping[str, Any], *edges: int, is_moe: bool = False
) -> FamilyShape:
    return FamilyShape(
        title, config_class, settings, edges or (CHUNK,), is_recurrent=True, is_moe=is_moe
    )


def _moe(title: str, config_class: str, settings: Mapping[str, Any], *edges: int) -> FamilyShape:
    return FamilyShape(title, config_class, settings, edges, is_moe=True)


FAMILIES: dict[str, FamilyShape] = {
    "qwen3": FamilyShape("Qwen3", "Qwen3Config", {**_HEAD, "tie_word_embeddings": True}),
    "qwen3-moe": _moe("Qwen3-MoE", "Qwen3MoeConfig", {**_HEAD, **_EXPERTS, "norm_topk_prob": True}),
    "qwen3-next": _recurrent(
        "Qwen3-Next",
        "Qwen3NextConfig",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
        DELTA_CHUNK,
        is_moe=True,
    ),
    "qwen3.5": _recurrent("Qwen3.5 (text)", "Qwen3_5TextConfig", _DELTA, DELTA_CHUNK),
    "qwen3.5-moe": _recurrent(
        "Qwen3.5-MoE (text)",
        "Qwen3_5MoeTextConfig",
        {
            **_DELTA,
            **_EXPERTS,
            "intermediate_size": None,
            "shared_expert_intermediate_size": 16,
        },
        DELTA_CHUNK,
        is_moe=True,
    ),
    "qwen2.5": FamilyShape("Qwen2.5", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2.5-sliding": FamilyShape(
        "Qwen2.5 (sliding window)",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        (WINDOW,),
    ),
    "qwen2-moe": _moe(
        "Qwen2-MoE",
        "Qwen2MoeConfig",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
        WINDOW,
    ),
    "llama3": FamilyShape(
        "Llama 3",
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_CONTEXT,
            }
        },
        (ORIGINAL_CONTEXT,),
    ),
    "llama-dynamic": FamilyShape(
        "Llama (dynamic NTK RoPE)",
        "LlamaConfig",
        {
            # Dynamic RoPE takes the context that a model was trained with from this setting.
            "max_position_embeddings": ORIGINAL_CONTEXT,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 20.0},
        },
        (ORIGINAL_CONTEXT,),
    ),
    "llama4": _moe(
        "Llama 4 (text)",
        "Llama4TextConfig",
        {
            **_FOUR,
            **_HEAD,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": CHUNK,
            "floor_scale": CHUNK,
        },
        CHUNK,
    ),
    "mistral": FamilyShape("Mistral", "MistralConfig", {"sliding_window": WINDOW}, (WINDOW,)),
    "ministral": FamilyShape("Ministral", "MinistralConfig", {**_HEAD, **_ALTERNATING}, (WINDOW,)),
    "ministral3": FamilyShape(
        "Ministral 3",
        "Ministral3Config",
        {
            **_HEAD,
            "rope_parameters": {
                **_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        (ORIGINAL_CONTEXT,),
    ),
    "mixtral": _moe(
        "Mixtral", "MixtralConfig", {**_LOCAL_EXPERTS, "sliding_window": WINDOW}, WINDOW
    ),
    "gemma2": FamilyShape(
        "Gemma 2",
        "Gemma2Config",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
        (WINDOW,),
    ),
    "gemma3": FamilyShape(
        "Gemma 3 (text)", "Gemma3TextConfig", {**_GEMMA, "query_pre_attn_scalar": 8}, (WINDOW,)
    ),
    "gemma3n": FamilyShape(
        "Gemma 3n (text)",
        "Gemma3nTextConfig",
        {
            **_GEMMA,
            **_FOUR,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        },
        (WINDOW,),
    ),
    "gemma4": FamilyShape(
        "Gemma 4 (text)",
        "Gemma4TextConfig",
        {
            **_GEMMA,
            **_FOUR,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
        },
        (WINDOW,),
    ),
    "gemma4-moe": _moe(
        "Gemma 4 MoE (text)",
        "Gemma4TextConfig",
        {
            **_GEMMA,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        WINDOW,
    ),
    "phi3": FamilyShape("Phi-3", "Phi3Config", {"sliding_window": CHUNK}, (CHUNK,)),
    "phi4-mini": FamilyShape(
        "Phi-4-mini (longrope)",
        "Phi3Config",
        {
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
            "rope_parameters": _LONGROPE,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        (ORIGINAL_CONTEXT,),
    ),
    "phimoe": _moe(
        "Phi-MoE",
        "PhimoeConfig",
        {
            **_LOCAL_EXPERTS,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "lm_head_bias": True,
            # transformers applies jitter in training mode only, at random.
            "router_jitter_noise": 0.0,
            "rope_parameters": {
                **_LONGROPE,
                "short_mscale": 1.1,
                "long_mscale": 1.2,
                "original_max_position_embeddings": ORIGINAL_CONTEXT,
            },
        },
        WINDOW,
        ORIGINAL_CONTEXT,
    ),
    "smollm3": FamilyShape("SmolLM3", "SmolLM3Config", {**_FOUR, "tie_word_embeddings": True}),
    "glm4": FamilyShape("GLM4", "Glm4Config", _HEAD),
    "glm4-moe": _moe(
        "GLM4-MoE",
        "Glm4MoeConfig",
        {
            **_HEAD,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "gpt-oss": _moe(
        "gpt-oss",
        "GptOssConfig",
        {
            **_HEAD,
            **_ALTERNATING,
            **_LOCAL_EXPERTS,
            "rope_parameters": {**_YARN, "truncate": False},
        },
        WINDOW,
        ORIGINAL_CONTEXT,
    ),
    "deepseek-v3": _moe(
        "DeepSeek-V3",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        ORIGINAL_CONTEXT,
    ),
    "granite": FamilyShape(
        "Granite",
        "GraniteConfig",
        {"logits_scaling": 2.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    "granitemoe": _moe("GraniteMoE", "GraniteMoeConfig", {**_LOCAL_EXPERTS, "logits_scaling": 2.0}),
    "granite4": _recurrent(
        "Granite 4 (hybrid)",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            **_LOCAL_EXPERTS,
            "shared_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "logits_scaling": 2.0,
        },
        is_moe=True,
    ),
    "granite4-dense": _recurrent(
        "Granite 4 (hybrid, dense)",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "bamba": _recurrent("Bamba", "BambaConfig", {**_MAMBA, "attn_layer_indices": [1]}),
    "lfm2": _recurrent(
        "LFM2",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        4,
    ),
    "lfm2-moe": _recurrent(
        "LFM2-MoE",
        "Lfm2MoeConfig",
        {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        4,
        is_moe=True,
    ),
    "nemotron-h": _recurrent(
        "Nemotron-H",
        "NemotronHConfig",
        {
            **_FOUR,
            **_HEAD,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": CHUNK,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
        is_moe=True,
    ),
    "falcon-h1": _recurrent(
        "Falcon-H1", "FalconH1Config", {**_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}
    ),
    "mamba2": _recurrent(
        "Mamba2",
        "Mamba2Config",
        {
            **_NO_ATTENTION,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": CHUNK,
        },
    ),
    "olmo2": FamilyShape("OLMo 2", "Olmo2Config"),
    "olmo3": FamilyShape("OLMo 3", "Olmo3Config", _ALTERNATING, (WINDOW,)),
    "olmo-hybrid": _recurrent(
        "OLMo hybrid",
        "OlmoHybridConfig",
        {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        DELTA_CHUNK,
    ),
    "cohere": FamilyShape("Cohere", "CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": FamilyShape(
        "Cohere 2", "Cohere2Config", {**_ALTERNATING, "logit_scale": 0.25}, (WINDOW,)
    ),
    "minimax": _recurrent(
        "MiniMax",
        "MiniMaxConfig",
        {
            **_LOCAL_EXPERTS,
            "block_size": CHUNK,
            "layer_types": ["linear_attention", "full_attention"],
        },
        is_moe=True,
    ),
    "minimax-m2": _moe("MiniMax-M2", "MiniMaxM2Config", {**_HEAD, **_LOCAL_EXPERTS}),
    "hunyuan": FamilyShape("Hunyuan (dense)", "HunYuanDenseV1Config", _HEAD),
    "seed-oss": FamilyShape(
        "Seed-OSS",
        "SeedOssConfig",
        # Released checkpoints have no dropout, though the class defaults to some.
        {**_HEAD, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "exaone4": FamilyShape("EXAONE 4", "Exaone4Config", _ALTERNATING, (WINDOW,)),
    "ernie4.5": FamilyShape("ERNIE 4.5", "Ernie4_5Config", {**_HEAD, "tie_word_embeddings": True}),
    "ernie4.5-moe": _moe(
        "ERNIE 4.5 MoE",
        "Ernie4_5_MoeConfig",
        {
            "moe_intermediate_size": 16,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "starcoder2": FamilyShape(
        "StarCoder2",
        "Starcoder2Config",
        {"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        (WINDOW,),
    ),
    "jamba": _recurrent(
        "Jamba",
        "JambaConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
        },
        4,
        is_moe=True,
    ),
    "zamba2": _recurrent(
        "Zamba2",
        "Zamba2Config",
        {
            **_FOUR,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "chunk_size": CHUNK,
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "adapter_rank": 4,
            "use_mem_rope": True,
        },
    ),
}
"""From a name to how the family's tiny model is made."""


def build_config(name: str, tokenizer: Any = None, **changes: Any) -> Any:
    """Returns a family's configuration with a tokenizer's special tokens; `changes` go into it."""
    import transformers

    shape = FAMILIES[name]
    ids = {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_token_id,
        "eos_token_id": None if tokenizer is None else tokenizer.eos_token_id,
    }
    settings = {**_SIZES, **shape.settings, **changes}
    # Settings that a class lacks are left out; a window may be None on purpose.
    kept = {k: v for k, v in settings.items() if v is not None or k == "sliding_window"}
    return getattr(transformers, shape.config_class)(**kept, **ids)


def build_family(name: str, tokenizer: Any = None, *, seed: int = 0, **changes: Any) -> Any:
    """Returns a family's model with random weights, in fp32 and evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = build_config(name, tokenizer, **changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save_family(root: Path, name: str, *, seed: int = 0, template: str = "chatml") -> Path:
    """Saves a family's model with a tokenizer unless it is there already; returns its folder."""
    from fakes.tiny_models import build_tokenizer

    folder = root / f"{name}-{template}-{seed}"
    if not folder.exists():
        tokenizer = build_tokenizer(template)
        build_family(name, tokenizer, seed=seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder

"""Tiny models of the families that Stillroom converts to GGUF, each with its kind of tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from fakes import chat_templates
from fakes.tiny_models import LINES

VOCABULARY = 768
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_SPLITS = {
    "gpt2": _WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS]),
    "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2), "isolated"), _BYTES]),
}
TEXTS = [
    *LINES,
    "In 2024 it cost 12345.678 €,  I'll   say; we'd've paid 7.",
    "Grüße, 你好 и привет 👋🏽!\n\n\tdef f(x):\n        return x ** 2\r\n",
    "DON'T SHOUT, I'M HERE   \n \n",
]
"""Texts that tokenizers of different families split differently."""
_SPECIAL = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
}
_UNKNOWN: dict[str, Any] = {"unk_token": "<unk>"}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
_LAYERS: dict[str, Any] = {"num_hidden_layers": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "smollm": ("smollm", lambda: LlamaConfig(**_SIZES, **_LAYERS, tie_word_embeddings=True)),
    "llama3": ("llama3", lambda: LlamaConfig(**_SIZES, **_LAYERS, rope_parameters=_LLAMA3_ROPE)),
    "qwen2": ("qwen2", lambda: Qwen2Config(**_SIZES, **_LAYERS, tie_word_embeddings=False)),
    "qwen3": ("gpt2", lambda: Qwen3Config(**_SIZES, **_LAYERS, tie_word_embeddings=True)),
    "gemma3": (
        "pieces",
        lambda: Gemma3TextConfig(
            **_SIZES, num_hidden_layers=6, sliding_window=8, query_pre_attn_scalar=16
        ),
    ),
}
"""From a name to the kind of tokenizer and the configuration."""


def save_model(name: str, folder: Path, **changes: Any) -> Path:
    """Saves a tiny model of a family, whose embeddings are more than its tokens; `changes` are set
    on its configuration."""
    kind, make_config = FAMILIES[name]
    tokenizer = _pieces() if kind == "pieces" else _byte_level(kind)
    assert len(tokenizer) < VOCABULARY
    config = make_config()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms and biases, which are all alike at first
                weight.add_(0.2 * torch.randn_like(weight))
        # llama.cpp gives no probability of the end of a turn, and of a part of a character.
        parts = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
        model.get_output_embeddings().weight[[*tokenizer.all_special_ids, *parts]] = 0.0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_level(kind: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(BPE(ignore_merges=kind == "llama3"))
    core.pre_tokenizer = _SPLITS[kind]
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 100,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS * 2, trainer)
    return _finished(core)


def _pieces() -> PreTrainedTokenizerFast:
    """Returns a tokenizer as Gemma's: pieces with bytes for what they lack, merged in any way."""
    core = Tokenizer(BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    # Enough characters are unknown for bytes to be needed.
    trainer = trainers.BpeTrainer(vocab_size=300, limit_alphabet=60, show_progress=False)
    core.train_from_iterator(TEXTS * 2, trainer)
    learnt = [piece for piece, _ in sorted(core.get_vocab().items(), key=lambda item: item[1])]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    known = set(learnt)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in learnt
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    core = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, **_UNKNOWN))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _finished(core)


def _finished(core: Tokenizer) -> PreTrainedTokenizerFast:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    core.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        **_SPECIAL,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_templates.CHATML
    return tokenizer

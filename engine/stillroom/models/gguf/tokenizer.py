"""Builds a tokenizer from the metadata of a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stillroom.errors import ModelError
from stillroom.models.gguf.header import HF_FORMAT_FIX, GgufHeader


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of a file's special tokens."""

    bos: int | None
    eos: list[int]
    """The ids of the tokens that end a text (`eos`), a turn (`eot`) or a message (`eom`)."""
    pad: int | None


def special_ids(header: GgufHeader) -> SpecialIds:
    """Returns the ids of the special tokens that a file names."""

    def token_id(name: str) -> int | None:
        return header.values.get(f"tokenizer.ggml.{name}_token_id")

    eos = [token for name in ("eos", "eot", "eom") if (token := token_id(name)) is not None]
    return SpecialIds(token_id("bos"), list(dict.fromkeys(eos)), token_id("padding"))


def build_tokenizer(header: GgufHeader) -> Any:
    """Returns the tokenizer of a GGUF file, with its chat template and special tokens."""
    path, values = header.path, header.values
    # This class reads the vocabulary only; others parse the whole file again, slowly.
    loaded: Any = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = loaded.backend_tokenizer
    if values.get("tokenizer.ggml.model") == "gpt2":
        _set_pre_tokenizer(backend, values.get("tokenizer.ggml.pre"))
    backend.post_processor = None
    if loaded.bos_token is not None and values.get("tokenizer.ggml.add_bos_token", False):
        bos = (loaded.bos_token, loaded.bos_token_id)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]}:1 $B:1", special_tokens=[bos]
        )
    # Not the architecture's own class: some rebuild the pre-tokenizer when they are loaded.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=loaded.bos_token,
        eos_token=loaded.eos_token,
        pad_token=loaded.pad_token,
        unk_token=loaded.unk_token,
        model_max_length=header.setting("context_length"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = values.get("tokenizer.chat_template")
    return tokenizer


def check_saved_tokenizer(tokenizer: Any, folder: Path, header: GgufHeader) -> None:
    """Raises ModelError if the tokenizer encodes texts differently after it was saved and loaded.

    transformers rebuilds the tokenizers of some architectures when it loads them.
    """
    saved: Any = AutoTokenizer.from_pretrained(folder)
    for text in _PROBES:
        if saved.encode(text) != tokenizer.encode(text):
            raise ModelError(
                f"{header.path} states the pre-tokenizer "
                f"{header.values.get('tokenizer.ggml.pre')!r}, which transformers does not use for "
                f"{header.architecture}",
                HF_FORMAT_FIX,
            )


def _set_pre_tokenizer(backend: Any, name: str | None) -> None:
    """Gives a byte-level tokenizer the pre-tokenizer and the normalizer that its file names.

    transformers chooses them by the architecture, and does not know all of them.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.normalizer = None
    match name:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        case "llama-bpe":
            backend.pre_tokenizer = _split(_LLAMA3)
            # A word that is itself a token is kept whole; merges are not applied to it.
            backend.model.ignore_merges = True
        case "qwen2":
            backend.pre_tokenizer = _split(_QWEN2)
            backend.normalizer = normalizers.NFC()
        case _:
            backend.pre_tokenizer = byte_level


def _split(pattern: str) -> Any:
    """Returns a byte-level pre-tokenizer that splits text at a pattern."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


_PROBES = (
    "It's  12345 lamps, they'LL cost $7.50!\n\n\tx = a_b**2  # naïve\r\n",
    " leading and trailing ",
    "日本語 text — “quoted” № 5 …",
)
# Source: the tokenizer.json of Llama 3 and of Qwen2.
_BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _BEFORE_DIGITS + r"\p{N}{1,3}" + _AFTER_DIGITS
_QWEN2 = _BEFORE_DIGITS + r"\p{N}" + _AFTER_DIGITS

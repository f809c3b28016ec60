"""The tokenizer of a GGUF file, such that a text has the tokens that the model was trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stillroom.errors import ModelError
from stillroom.models.gguf.header import OTHER_FORM, GgufHeader


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of a file's special tokens."""

    bos: int | None
    ends: list[int]
    """The tokens that end a text, a turn (`eot`) or a message (`eom`), each once."""
    pad: int | None


def special_ids(header: GgufHeader) -> SpecialIds:
    """Returns the special tokens that a file names."""

    def named(name: str) -> int | None:
        return header.values.get(f"tokenizer.ggml.{name}_token_id")

    ends = [token for name in ("eos", "eot", "eom") if (token := named(name)) is not None]
    return SpecialIds(named("bos"), list(dict.fromkeys(ends)), named("padding"))


def tokenizer_of(header: GgufHeader) -> Any:
    """Returns the tokenizer of a GGUF file, with its chat template and special tokens."""
    path, values = header.path, header.values
    # This class reads the vocabulary alone; others parse the whole file again, slowly.
    read: Any = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    core = read.backend_tokenizer
    if values.get("tokenizer.ggml.model") == "gpt2":
        _cut_words(core, values.get("tokenizer.ggml.pre"))
    core.post_processor = None
    if read.bos_token is not None and values.get("tokenizer.ggml.add_bos_token", False):
        bos = (read.bos_token, read.bos_token_id)
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]}:1 $B:1", special_tokens=[bos]
        )
    # Not the class that goes with the architecture: some build their parts anew when loaded.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        pad_token=read.pad_token,
        unk_token=read.unk_token,
        model_max_length=header.of_model("context_length"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = values.get("tokenizer.chat_template")
    return tokenizer


def check_saved(tokenizer: Any, folder: Path, header: GgufHeader) -> None:
    """Raises ModelError if the saved tokenizer cuts texts otherwise than the one that was saved.

    transformers rebuilds the tokenizers of some architectures in its own way when it loads them.
    """
    saved: Any = AutoTokenizer.from_pretrained(folder)
    for text in _PROBES:
        if saved.encode(text) != tokenizer.encode(text):
            raise ModelError(
                f"transformers does not cut texts as {header.path} says "
                f"({header.values.get('tokenizer.ggml.pre')!r}) for {header.architecture}",
                OTHER_FORM,
            )


def _cut_words(core: Any, words: str | None) -> None:
    """Has a byte-level tokenizer cut texts into words as the file says.

    transformers goes by the architecture, and does not know all ways.
    """
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.normalizer = None
    match words:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            core.pre_tokenizer = pre_tokenizers.Sequence([digits, own])
        case "llama-bpe":
            core.pre_tokenizer = _split(_LLAMA3)
            # A word that is a token itself is one, whatever the merges would make of it.
            core.model.ignore_merges = True
        case "qwen2":
            core.pre_tokenizer = _split(_QWEN2)
            core.normalizer = normalizers.NFC()
        case _:
            core.pre_tokenizer = own


def _split(pattern: str) -> Any:
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([cut, plain])


_PROBES = (
    "It's  12345 lamps, they'LL cost $7.50!\n\n\tx = a_b**2  # naïve\r\n",
    " leading and trailing ",
    "日本語 text — “quoted” № 5 …",
)
# Source: the tokenizer.json of Llama 3 and of Qwen2.
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _ENDS + r"\p{N}" + _REST

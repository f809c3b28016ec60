"""Converts tokenizer vocabularies to llama.cpp's: byte-level BPE, or SentencePiece as in Gemma."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stillroom.errors import ModelError

Json = Mapping[str, Any]
_SPACE = "▁"
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_PRE_TOKENIZERS: Mapping[tuple[str, ...], tuple[str, bool]] = {
    ("words",): ("gpt-2", False),
    ("digits", "words"): ("smollm", False),
    (_LLAMA3, "bytes"): ("llama-bpe", True),
    (_QWEN2, "bytes"): ("qwen2", False),
}
"""llama.cpp's name of a pre-tokenizer, by the steps in which it splits text into words, and whether
the tokenizer must have `ignore_merges` (a word that is a token is not split)."""


class TokenType(IntEnum):
    """llama.cpp's types of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Recognised in prompts, and left out of answers."""
    USER_DEFINED = 4
    """Recognised in prompts before anything is split."""
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file."""

    model: str
    """llama.cpp's name for the algorithm: gpt2 or llama."""
    pre: str
    """llama.cpp's name for the pre-tokenizer, which splits text into words."""
    tokens: Sequence[str]
    types: Sequence[TokenType]
    merges: Sequence[str] = ()
    """For gpt2: the pairs of tokens to merge, each with a space between, in order."""
    scores: Sequence[float] = ()
    """For llama: each token's score; the pair whose merged token scores highest is merged first."""


def read_vocabulary(tokenizer: Json, size: int) -> Vocabulary:
    """Returns the vocabulary of a parsed tokenizer.json, padded to `size` tokens.

    Tokens with ids of `size` or more, for which the model has no embeddings, are left out. Raises
    ModelError if llama.cpp does not support the tokenizer.
    """
    model: Json = tokenizer["model"]
    if model["type"] != "BPE":
        raise _unsupported_error(f"is of type {model['type']}")
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [TokenType.UNUSED] * size
    for token, i in model["vocab"].items():
        if i < size:
            tokens[i], types[i] = token, TokenType.NORMAL
    merges = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
    if model.get("byte_fallback"):
        _check_sentencepiece(tokenizer)
        scores = _scores(merges, tokens)
        _set_sentencepiece_types(tokens, types, model.get("unk_token"))
        _set_added_tokens(tokenizer["added_tokens"], tokens, types)
        score_of_type = {
            TokenType.UNUSED: _UNUSED_SCORE,
            TokenType.CONTROL: _ADDED_SCORE,
            TokenType.USER_DEFINED: _ADDED_SCORE,
        }
        scores = [score_of_type.get(kind, score) for kind, score in zip(types, scores, strict=True)]
        return Vocabulary("llama", "default", tokens, types, scores=scores)
    pre = _pre_tokenizer_name(tokenizer)
    _set_added_tokens(tokenizer["added_tokens"], tokens, types)
    return Vocabulary("gpt2", pre, tokens, types, merges=[" ".join(pair) for pair in merges])


def _unsupported_error(reason: str) -> ModelError:
    return ModelError(
        f"llama.cpp does not support the model's tokenizer, which {reason}",
        "export with format merged, and serve it with vLLM or transformers; or set llama_cpp to a "
        "checkout of llama.cpp, whose converter may support it",
    )


def _set_added_tokens(added: Sequence[Json], tokens: list[str], types: list[TokenType]) -> None:
    """Sets the texts and types of the tokenizer's added tokens."""
    for token in added:
        text, is_special = token["content"], token["special"]
        if (i := token["id"]) < len(tokens):
            # llama.cpp searches the text for added tokens before spaces are replaced.
            tokens[i] = text if is_special else text.replace(_SPACE, " ")
            types[i] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED


def _pre_tokenizer_name(tokenizer: Json) -> str:
    """Returns llama.cpp's name of the pre-tokenizer of a byte-level tokenizer.

    Raises ModelError if llama.cpp has no such pre-tokenizer.
    """
    normalizer: Json | None = tokenizer["normalizer"]
    # llama.cpp does not normalise text to NFC, but nearly all text already is in NFC.
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _unsupported_error(f"normalises text with {normalizer['type']}")
    steps = tuple(_step(part) for part in _parts(tokenizer["pre_tokenizer"]))
    name, ignores_merges = _PRE_TOKENIZERS.get(steps, (None, False))
    if name is None or bool(tokenizer["model"].get("ignore_merges")) != ignores_merges:
        raise _unsupported_error("splits text into words by its own rules")
    return name


def _parts(pre_tokenizer: Json | None) -> Sequence[Json]:
    """Returns the steps of a pre-tokenizer in tokenizer.json."""
    if pre_tokenizer is None:
        return []
    is_sequence = pre_tokenizer["type"] == "Sequence"
    return pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]


def _step(part: Json) -> str:
    """Returns the name of a pre-tokenizer's step, as in the keys of `_PRE_TOKENIZERS`."""
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses_regex}:
            return "words" if uses_regex else "bytes"
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
            return regex
        case _:
            return f"unknown: {part['type']}"


def _check_sentencepiece(tokenizer: Json) -> None:
    """Raises ModelError unless text is prepared as for Gemma: spaces become `▁`, nothing else."""
    normalizer, parts = tokenizer["normalizer"], _parts(tokenizer["pre_tokenizer"])
    expected = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    # After the normaliser there are no spaces to split at.
    splits_nothing = all(
        part["type"] == "Split" and part["pattern"] == {"String": " "} for part in parts
    )
    if normalizer != expected or not splits_nothing:
        raise _unsupported_error("has byte_fallback, but normalises or splits text unlike Gemma's")


def _scores(merges: Sequence[tuple[str, ...]], tokens: Sequence[str]) -> list[float]:
    """Returns a score for each token, so that llama.cpp applies merges in the tokenizer's order.

    llama.cpp always merges the pair whose merged token has the highest score. Several pairs may
    merge into the same token; they are adjacent in `merges`, so one score for all keeps the order.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, 0)) for token in tokens]


def _set_sentencepiece_types(
    tokens: Sequence[str], types: list[TokenType], unknown: str | None
) -> None:
    """Sets the types of the byte tokens and of the unknown token."""
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    for i, token in enumerate(tokens):
        if token in byte_tokens:
            types[i] = TokenType.BYTE
        elif token == unknown:
            types[i] = TokenType.UNKNOWN

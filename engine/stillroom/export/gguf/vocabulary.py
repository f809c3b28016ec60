"""A tokenizer's vocabulary as llama.cpp reads it: byte-level BPE, or pieces as Gemma has them."""

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
_SPLITS: Mapping[tuple[str, ...], tuple[str, bool]] = {
    ("words",): ("gpt-2", False),
    ("digits", "words"): ("smollm", False),
    (_LLAMA3, "bytes"): ("llama-bpe", True),
    (_QWEN2, "bytes"): ("qwen2", False),
}
"""From how text is split into words to llama.cpp's name for it, and whether a word that is one
token is taken before merges are applied."""


class TokenType(IntEnum):
    """What llama.cpp does with a token."""

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
    """llama.cpp's name of the algorithm: gpt2 or llama."""
    pre: str
    """llama.cpp's name of how text is split into words."""
    tokens: Sequence[str]
    types: Sequence[TokenType]
    merges: Sequence[str] = ()
    """For gpt2: two tokens each, with a space between."""
    scores: Sequence[float] = ()
    """For llama: pieces of a higher score are joined first."""


def read_vocabulary(tokenizer: Json, size: int) -> Vocabulary:
    """Returns the vocabulary of a parsed tokenizer.json, filled up to `size` tokens.

    Tokens beyond `size`, which the model has no embeddings for, are left out. Raises ModelError if
    llama.cpp has no such tokenizer.
    """
    model: Json = tokenizer["model"]
    if model["type"] != "BPE":
        raise _unknown(f"is of type {model['type']}")
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [TokenType.UNUSED] * size
    for token, i in model["vocab"].items():
        if i < size:
            tokens[i], types[i] = token, TokenType.NORMAL
    merges = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
    if model.get("byte_fallback"):
        _check_pieces(tokenizer)
        scores = _scores(merges, tokens)
        _mark_pieces(tokens, types, model.get("unk_token"))
        _add(tokenizer["added_tokens"], tokens, types)
        by_type = {TokenType.UNUSED: _UNUSED_SCORE, TokenType.CONTROL: _ADDED_SCORE}
        by_type[TokenType.USER_DEFINED] = _ADDED_SCORE
        scores = [by_type.get(kind, score) for kind, score in zip(types, scores, strict=True)]
        return Vocabulary("llama", "default", tokens, types, scores=scores)
    pre = _word_split(tokenizer)
    _add(tokenizer["added_tokens"], tokens, types)
    return Vocabulary("gpt2", pre, tokens, types, merges=[" ".join(pair) for pair in merges])


def _unknown(reason: str) -> ModelError:
    return ModelError(
        f"llama.cpp has no tokenizer like this model's, which {reason}",
        "export with format merged and serve it with vLLM or transformers; or give llama_cpp, a "
        "checkout of llama.cpp whose converter may know it",
    )


def _add(added: Sequence[Json], tokens: list[str], types: list[TokenType]) -> None:
    for one in added:
        if (i := one["id"]) < len(tokens):
            # llama.cpp looks for it in the text as it is.
            tokens[i] = one["content"] if one["special"] else one["content"].replace(_SPACE, " ")
            types[i] = TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED


def _word_split(tokenizer: Json) -> str:
    """Returns llama.cpp's name of how a byte-level tokenizer splits text into words."""
    normalizer: Json | None = tokenizer["normalizer"]
    # llama.cpp leaves texts that are not in NFC as they are, which hardly any are not.
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _unknown(f"normalises text by {normalizer['type']}")
    steps = tuple(_step(part) for part in _parts(tokenizer["pre_tokenizer"]))
    name, takes_words = _SPLITS.get(steps, (None, False))
    if name is None or bool(tokenizer["model"].get("ignore_merges")) != takes_words:
        raise _unknown("splits text into words in a way of its own")
    return name


def _parts(pre_tokenizer: Json | None) -> Sequence[Json]:
    if pre_tokenizer is None:
        return []
    is_sequence = pre_tokenizer["type"] == "Sequence"
    return pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]


def _step(part: Json) -> str:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses_regex}:
            return "words" if uses_regex else "bytes"
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
            return regex
        case _:
            return f"unknown: {part['type']}"


def _check_pieces(tokenizer: Json) -> None:
    """Raises ModelError unless text becomes pieces as Gemma's does: no space in front, no words."""
    normalizer, parts = tokenizer["normalizer"], _parts(tokenizer["pre_tokenizer"])
    expected = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    # After the normaliser there are no spaces to split at.
    is_idle = all(part["type"] == "Split" and part["pattern"] == {"String": " "} for part in parts)
    if normalizer != expected or not is_idle:
        raise _unknown("has pieces with a preparation of text that is not Gemma's")


def _scores(merges: Sequence[tuple[str, ...]], tokens: Sequence[str]) -> list[float]:
    """Returns a score for each token, by which joining the best pair is applying the first merge.

    The pairs that make one piece follow one another, as the piece's score has decided their order.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, 0)) for token in tokens]


def _mark_pieces(tokens: Sequence[str], types: list[TokenType], unknown: str | None) -> None:
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
    for i, token in enumerate(tokens):
        if token in bytes_:
            types[i] = TokenType.BYTE
        elif token == unknown:
            types[i] = TokenType.UNKNOWN

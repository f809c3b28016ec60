"""Small tokenizers that cut text as well-known families do, each with its chat template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from fakes import chat_templates, mask_families

TEKKEN = (Path(__file__).parents[2] / "scripts/demo_models/other_chat_template.jinja").read_text(
    encoding="utf-8"
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPLIT = rf"(?i:'s|'t|'re)|{_WORDS}|\p{{N}}{_REST}"
LLAMA_SPLIT = rf"(?i:'s|'t|'re)|{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_UNKNOWN = "<unk>"
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LINES = [
    "The answer is 1234. What does the lamp cost? It's 12 or 3.14159 dollars.",
    '{"item": "lamp", "n": [1, 2.5, null]} {"name": "price", "arguments": {"item": "lantern"}}',
    "naïve größer 日本語 привет 🙂 🙂 def f(x):\r\n\treturn x\n\n",
    "user assistant system tool think answer price stock calculator",
] * 3


@dataclass(frozen=True)
class TokenKind:
    """A way of cutting text, and the template and marks that go with it."""

    template: str
    marks: tuple[str, ...]
    """The first three: padding, beginning, end of a turn."""
    split: str | None
    """The pattern of byte-level pieces; None: SentencePiece with byte fallback."""
    merges: int = 300
    markup: tuple[str, ...] = ()
    is_composed: bool = False
    """Whether texts are put into their composed form first, as Qwen's are."""
    has_thinking: bool = False
    has_tools: bool = True


_HERMES = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
KINDS = {
    "qwen": TokenKind(
        chat_templates.QWEN3, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), QWEN_SPLIT,
        markup=_HERMES, is_composed=True, has_thinking=True,
    ),
    "llama": TokenKind(
        chat_templates.LLAMA3,
        ("<|pad|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        LLAMA_SPLIT, merges=500,
    ),
    "harmony": TokenKind(
        mask_families.HARMONY,
        ("<|endoftext|>", "<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>",
         "<|channel|>", "<|call|>"),
        O200K_SPLIT, merges=700, has_thinking=True,
    ),
    "gemma": TokenKind(
        chat_templates.GEMMA, ("<pad>", "<bos>", "<end_of_turn>", "<start_of_turn>"), None,
        has_tools=False,
    ),
    "glm": TokenKind(
        mask_families.GLM,
        ("<pad>", "[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>", "<|system|>",
         "<|observation|>"),
        LLAMA_SPLIT, merges=400, markup=_HERMES, has_thinking=True,
    ),
    "tekken": TokenKind(
        TEKKEN,
        ("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
         "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
        O200K_SPLIT, merges=200,
    ),
    "chatml": TokenKind(
        chat_templates.CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        r"\p{N}{1,2}|\p{L}+|\s+|[^\s\p{L}\p{N}]{1,3}",
        merges=150, markup=_HERMES,
    ),
}  # fmt: skip


def kind_tokenizer(
    name: str, *, lines: Sequence[str] = LINES, change: Callable[[Any], None] | None = None
) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a kind; `change` changes its core before it is trained."""
    kind = KINDS[name]
    core = _sentence_piece() if kind.split is None else _byte_level(kind.split)
    if kind.is_composed:
        core.normalizer = normalizers.NFC()
    if change is not None:
        change(core)
    known = (
        [] if kind.split is not None else [_UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256))]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind.split is not None else []
    core.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=len(known) + len(alphabet) + kind.merges,
            initial_alphabet=alphabet,
            limit_alphabet=256 if kind.split is not None else 60,
            special_tokens=known,
            show_progress=False,
        ),
    )
    if known:
        core = _plain_bytes(core)
    core.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in kind.marks]
    )
    core.add_tokens([AddedToken(text, normalized=False) for text in kind.markup])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=kind.marks[0],
        bos_token=kind.marks[1],
        eos_token=kind.marks[2],
        unk_token=_UNKNOWN if known else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = kind.template
    return tokenizer


def _byte_level(split: str) -> Tokenizer:
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core


def _sentence_piece() -> Tokenizer:
    """As Gemma: blanks are a character of their own, unknown characters are bytes."""
    core = Tokenizer(BPE(byte_fallback=True, unk_token=_UNKNOWN, fuse_unk=False))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return core


def _plain_bytes(core: Tokenizer) -> Tokenizer:
    """Returns the tokenizer with its byte tokens as plain ones, as Gemma has them."""
    import json

    written = json.loads(core.to_str())
    written["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(written))

"""What is trained in the benchmarks: models of two shapes with random weights, and batches."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from stillroom.demo import DEMO_MODELS
from stillroom.models.batches import TokenSequence
from stillroom.train.encode import TokenPair

SHAPES = {
    "32k": {
        "vocab_size": 32_768, "hidden_size": 384, "intermediate_size": 1152,
        "num_hidden_layers": 9, "num_attention_heads": 6,
    },
    "152k": {
        "vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 4,
    },
}  # fmt: skip
RANK = 16
MAX_LENGTH = 2048
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    method: str
    shape: str
    batch: int
    is_lora: bool = False
    is_packed: bool = False
    """The peer packs; ours always does."""


WORKS = {
    "sft-32k": Work("sft", "32k", 2),
    "sft-152k": Work("sft", "152k", 2),
    "sft-lora": Work("sft", "32k", 2, is_lora=True),
    "sft-packed": Work("sft", "32k", 3, is_packed=True),
    "dpo-lora": Work("dpo", "32k", 2, is_lora=True),
    "dpo-full": Work("dpo", "152k", 2),
}


def save_model(shape: str, root: Path) -> Path:
    """Returns the folder of a model with random weights; the same for the same shape."""
    folder = root / shape
    if folder.exists():
        return folder
    config = Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in DEMO_MODELS["demo/student"].iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, folder)
    return folder


def sft_batches(work: Work, steps: int) -> list[list[TokenSequence]]:
    """Returns conversations of some 830 tokens in five stretches, of which a fifth is trained."""
    rng = random.Random(1)
    rows: list[TokenSequence] = []
    for length in lengths(rng, work.batch * steps, median=790, sigma=0.35, most=MAX_LENGTH):
        marks = [i * 10 // length % 5 == 4 for i in range(length)]
        rows.append(TokenSequence(ids(rng, length), marks))
    return cut(rows, work.batch)


def dpo_batches(work: Work, steps: int) -> list[list[TokenPair]]:
    """Returns pairs with prompts of some 680 tokens and answers of some 90."""
    rng = random.Random(2)
    count = work.batch * steps
    prompts = lengths(rng, count, median=650, sigma=0.3, most=1600)
    answers = lengths(rng, 2 * count, median=70, sigma=0.7, most=400)
    pairs: list[TokenPair] = []
    for given, chosen, rejected in zip(prompts, answers[::2], answers[1::2], strict=True):
        prompt = ids(rng, given)
        sides = [
            TokenSequence([*prompt, *ids(rng, n)], [False] * given + [True] * n)
            for n in (chosen, rejected)
        ]
        pairs.append(TokenPair(*sides))
    return cut(pairs, work.batch)


def num_tokens(batch: Sequence[TokenSequence | TokenPair]) -> int:
    """Returns the tokens that are not padding; a pair's prompt counts twice."""
    return sum(
        len(item.ids)
        if isinstance(item, TokenSequence)
        else len(item.chosen.ids) + len(item.rejected.ids)
        for item in batch
    )


def lengths(rng: random.Random, count: int, *, median: int, sigma: float, most: int) -> list[int]:
    return [min(most, max(10, int(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]


def ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 4000) for _ in range(length)]


def cut(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]

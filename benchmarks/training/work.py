"""What is trained in the benchmarks: models with random weights, and batches of tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beside_trl.models import save_model

from stillroom.models.batches import TokenSequence
from stillroom.train.methods.dpo import TokenPair

MAX_LENGTH = 2048


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


def model_folder(shape: str, root: Path) -> Path:
    """Returns the folder of a model with random weights; the same for the same shape."""
    folder = root / shape
    if not folder.exists():
        save_model(shape, folder, seed=7)
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

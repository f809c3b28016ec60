"""Checkpoints to export, and what exported models say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fakes.conversations import answer, user
from fakes.tiny_models import TinyModels, build_tokenizer
from fakes.training import Project, make_project
from stillroom.data.chat.render import ChatRenderer

ITEMS = {"lamp": 12, "chair": 7, "table": 30, "stock": 4}
QUESTIONS = [
    f"{opening}What does the {item} cost?{' Say.' * again}"
    for item in ITEMS
    for opening in ("", "So. ", "Well, ", "Please. ", "Now: ")
    for again in range(5)
]
ROWS = [
    {"messages": [user(question), answer(f"It costs {price}.")]}
    for item, price in ITEMS.items()
    for question in QUESTIONS
    if item in question
]
SHAPES = {"tied": ("qwen3", True), "own head": ("llama", False)}


def in_numbers(models: TinyModels, shape: str, dtype: torch.dtype, folder: Path) -> Path:
    """Saves a tiny model whose files have this number format."""
    architecture, is_tied = SHAPES[shape]
    start = models.folder(architecture, "chatml", tie_word_embeddings=is_tied)
    model: Any = AutoModelForCausalLM.from_pretrained(start, dtype=dtype)
    model.save_pretrained(folder)
    build_tokenizer("chatml").save_pretrained(folder)
    return folder


def trained(root: Path, start: Path, *, rank: int, method: str = "sft", epochs: int = 1) -> Project:
    """Trains run-1 of a project, for long enough that the model is sure of what it says."""
    project = make_project(
        root,
        method,
        start,
        model={"qlora_rank": rank},
        trainer={"num_epochs": epochs, "learning_rate": 1e-2},
        data={"batch_size": 10},
    )
    project.write(ROWS)
    project.train()
    return project


def prompts(tokenizer: Any) -> list[list[int]]:
    """Returns a hundred prompts as tokens, of several lengths."""
    renderer = ChatRenderer(tokenizer)
    return [renderer.prompt_ids([user(question)], []) for question in QUESTIONS]


@torch.no_grad()
def greedy(model: Any, starts: Sequence[Sequence[int]], *, num_tokens: int = 12) -> list[list[int]]:
    """Returns the most probable continuations; prompts of one length go together."""
    said: dict[tuple[int, ...], list[int]] = {}
    for length in {len(ids) for ids in starts}:
        group = [list(ids) for ids in starts if len(ids) == length]
        rows = given = torch.tensor(group)
        cache = None
        for _ in range(num_tokens):
            output = model(given, past_key_values=cache, use_cache=True)
            given, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            rows = torch.cat([rows, given], dim=1)
        for ids, row in zip(group, rows.tolist(), strict=True):
            said[tuple(ids)] = _turn(row[length:], model.generation_config.eos_token_id)
    return [said[tuple(ids)] for ids in starts]


def _turn(ids: list[int], ends: int | list[int]) -> list[int]:
    stops = ends if isinstance(ends, list) else [ends]
    stop = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return ids[: stop + 1]

"""A model without a chat template, as base models are, and with one put next to it."""

import shutil
from pathlib import Path

import torch

from fakes.tiny_models import TinyModels
from stillroom.data.chat.template import template_file


def save_base(models: TinyModels, folder: Path) -> Path:
    """Saves a model without a chat template, whose texts end with <|endoftext|>.

    It never writes <end_of_turn>, and <|im_end|> often.
    """
    loaded = models.load("llama")
    model, tokenizer = loaded.model, loaded.tokenizer
    head = model.get_output_embeddings().weight.data
    # The first coordinate of the states is the same everywhere.
    head[tokenizer.convert_tokens_to_ids("<end_of_turn>")] = -20.0 * (torch.arange(32) == 0)
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_chatml(folder: Path, copy: Path) -> Path:
    """Copies a model, and puts the template chatml into the copy."""
    shutil.copytree(folder, copy)
    shutil.copy(template_file("chatml"), copy / "chat_template.jinja")
    return copy

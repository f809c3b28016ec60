"""The model being trained: all its weights, or a LoRA adapter on a frozen base."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stillroom.errors import ConfigError, missing_extra
from stillroom.models.heads import OutputHead
from stillroom.models.load import (
    LoadedModel,
    adapter_base,
    load_adapter,
    load_tokenizer,
    load_weights,
    stop_token_ids,
)
from stillroom.models.precision import Precision
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.settings import Workspace
from stillroom.train.config import ModelSection

# Logits of a microbatch stay below this many numbers.
_MAX_LOGITS = 1 << 27


@dataclass(frozen=True, slots=True)
class Student:
    """A trainable model with its tokenizer and output head."""

    loaded: LoadedModel
    head: OutputHead
    base: ModelLocation
    """What training starts from; for an adapter, the model it belongs on."""
    is_adapter: bool

    @property
    def module(self) -> nn.Module:
        """The torch module (for an adapter, the peft model)."""
        return self.loaded.model

    def trainable(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that are trained."""
        return (p for p in self.module.parameters() if p.requires_grad)

    def autocast(self) -> AbstractContextManager[Any]:
        """Runs matrix products in bf16 on CUDA; weights keep their own format."""
        if self.loaded.device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", dtype=torch.bfloat16)

    @property
    def max_microbatch_tokens(self) -> int:
        """How many padded tokens a forward pass with gradient may have."""
        vocabulary = int(self.loaded.model.config.get_text_config().vocab_size)
        return max(512, min(16384, _MAX_LOGITS // vocabulary))


def load_student(workspace: Workspace, section: ModelSection, *, seed: int) -> Student:
    """Returns the model that config.yml's `model` section describes, ready to train.

    Starting from an adapter's checkpoint goes on training that adapter.
    Raises ConfigError if the checkpoint and `qlora_rank` do not fit together.
    """
    location = locate_model(workspace, section.path)
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(location)
    if location.is_adapter:
        model = _continued_adapter(workspace, location, section)
        base = adapter_base(workspace, location)
    else:
        base = location
        model = load_weights(location, precision=_precision(section))
        if section.qlora_rank > 0:
            model = _new_adapter(model, section)
    head = OutputHead(model)
    head.check()
    loaded = LoadedModel(location, model, tokenizer, stop_token_ids(model, tokenizer))
    return Student(loaded, head, base, is_adapter=section.qlora_rank > 0)


def _precision(section: ModelSection) -> Precision:
    # All weights trained: fp32, or small updates are lost in bf16's rounding.
    return "fp32" if section.precision == "auto" and section.qlora_rank == 0 else section.precision


def _new_adapter(model: Any, section: ModelSection) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise missing_extra("train", "training a LoRA adapter") from error
    return get_peft_model(
        model,
        LoraConfig(
            r=section.qlora_rank,
            lora_alpha=section.alpha,
            target_modules="all-linear",
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        ),
    )


def _continued_adapter(workspace: Workspace, location: ModelLocation, section: ModelSection) -> Any:
    model = load_adapter(workspace, location, precision=_precision(section), is_trainable=True)
    rank = model.peft_config["default"].r
    if rank != section.qlora_rank:
        raise ConfigError(
            f"model.path {section.path!r} is a LoRA adapter of rank {rank}, but model.qlora_rank "
            f"is {section.qlora_rank}",
            f"set model.qlora_rank: {rank} to go on training this adapter, or start from its base",
        )
    return model

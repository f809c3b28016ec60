"""What plain transformers and peft give for the same weights and tokens: one unpadded pass a sequence, nothing of ours."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from stillroom.models.batches import TokenSequence


def load(folder: Path) -> Any:
    """Returns a folder's model in fp32, a multimodal one with its towers."""
    config = AutoConfig.from_pretrained(folder)
    is_whole = hasattr(config, "vision_config")
    loader = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


def load_adapter(base: Path, folder: Path, *, is_trainable: bool = False) -> Any:
    """Returns peft's model of an adapter, on the whole base even if the adapter is of its text part alone."""
    model = load(base)
    with tempfile.TemporaryDirectory() as renamed:
        if of_text_part(model, folder):
            folder = rename_for_whole(model, folder, Path(renamed))
        return PeftModel.from_pretrained(model, folder, is_trainable=is_trainable).eval()


def merged(base: Path, folder: Path) -> Any:
    """Returns a model with an adapter merged in float64, so that each weight is rounded once."""
    return load_adapter(base, folder).double().merge_and_unload().float()


def of_text_part(model: Any, folder: Path) -> bool:
    """Returns whether a model has towers, and the adapter's names are those of a text model."""
    is_whole = hasattr(model.config, "vision_config")
    return is_whole and not any(
        "language_model" in name for name in load_file(folder / "adapter_model.safetensors")
    )


def lost_towers(base: Path, written: Path, form: str) -> str | None:
    """Returns what an export of a multimodal model lacks to stand in its original's place, or None."""
    if form == "adapter":
        is_of_part = of_text_part(load(base), written)
        return (
            "the adapter has the names of the text part and does not load on the original"
            if is_of_part
            else None
        )
    is_whole = hasattr(AutoConfig.from_pretrained(written), "vision_config")
    return None if is_whole else "the export has the text part alone"


def rename_for_whole(model: Any, folder: Path, target: Path) -> Path:
    """Writes an adapter of a text model with the names of the text part in the whole model."""
    path = next(
        name
        for name, _ in model.named_modules()
        if "language_model" in name and name.endswith("layers")
    )
    tensors = load_file(folder / "adapter_model.safetensors")
    before, after = "base_model.model.model.layers", f"base_model.model.{path}"
    save_file(
        {name.replace(before, after): tensor for name, tensor in tensors.items()},
        target / "adapter_model.safetensors",
    )
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    leaves = "|".join(
        sorted(
            {name.rpartition("layers.")[2].replace(".", r"\.") for name in config["target_modules"]}
        )
    )
    config["target_modules"] = rf"{path}\.(.*\.)?({leaves})"
    (target / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def forget_lengths(model: nn.Module) -> None:
    """Undoes what dynamic RoPE keeps of a longer sequence, since each one is to be the first."""
    for module in model.modules():
        if hasattr(module, "max_seq_len_cached") and hasattr(module, "original_inv_freq"):
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq.clone()


def logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Returns the logits of one sequence, [T, V], in float32."""
    forget_lengths(model)
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def trained_logprobs(model: Any, sequence: TokenSequence) -> Tensor:
    """Returns the log-probability (nats) of each trained token, [N]."""
    at = [i for i in range(1, len(sequence.ids)) if sequence.trained[i]]
    each_TV = logits(model, sequence.ids).log_softmax(-1)
    return each_TV[[i - 1 for i in at], [sequence.ids[i] for i in at]]


def nll(model: Any, sequences: Sequence[TokenSequence]) -> float:
    """Adds the gradient of the mean token loss and returns it."""
    num_tokens = sum(sequence.num_trained for sequence in sequences)
    total = 0.0
    for sequence in sequences:
        loss = -trained_logprobs(model, sequence).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total


def preference(model: Any, pairs: Sequence[Any], *, beta: float) -> float:
    """Adds the gradient of DPO's mean loss over pairs with their reference's log-probabilities."""
    total = 0.0
    for one in pairs:
        chosen = trained_logprobs(model, one.pair.chosen).sum() - one.chosen
        rejected = trained_logprobs(model, one.pair.rejected).sum() - one.rejected
        loss = -logsigmoid(beta * (chosen - rejected)) / len(pairs)
        loss.backward()
        total += loss.item()
    return total


def reverse_kl(model: Any, teacher: Any, sequences: Sequence[TokenSequence]) -> float:
    """Adds the gradient of the mean KL(model || teacher) over trained tokens and returns it."""
    num_tokens = sum(sequence.num_trained for sequence in sequences)
    total = 0.0
    for sequence in sequences:
        before = [i - 1 for i in range(1, len(sequence.ids)) if sequence.trained[i]]
        with torch.no_grad():
            log_q = logits(teacher, sequence.ids)[before].log_softmax(-1)
        log_p = logits(model, sequence.ids)[before].log_softmax(-1)
        loss = (log_p.exp() * (log_p - log_q)).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def next_tokens(model: Any, ids: Sequence[int], *, stops: frozenset[int], count: int) -> list[int]:
    """Returns the greedy continuation by transformers' generate, with its own cache if that is exact."""
    forget_lengths(model)
    given = torch.tensor([list(ids)])
    said = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        use_cache=has_exact_steps(model),
        max_new_tokens=count,
        eos_token_id=sorted(stops),
        pad_token_id=0,
    )
    return said[0, len(ids) :].tolist()


def has_exact_steps(model: Any) -> bool:
    """Returns whether transformers' passes of one token over its cache are those of a whole pass.

    With dynamic RoPE the cache keeps keys of earlier lengths' frequencies. Where Mamba's time steps
    have a lower bound above 0, passes of one token leave it out.
    """
    parameters = getattr(model.config, "rope_parameters", None) or {}
    limits = [getattr(module, "time_step_limit", None) or (0.0,) for module in model.modules()]
    return parameters.get("rope_type") != "dynamic" and not any(limit[0] > 0 for limit in limits)


@torch.no_grad()
def is_tie(model: Any, ids: Sequence[int], first: int, second: int) -> bool:
    """Returns whether rounding decides between two tokens: their logits differ by less than 1e-3."""
    last_V = logits(model, ids)[-1]
    return abs((last_V[first] - last_V[second]).item()) < 1e-3


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients by the names of the text part's parameters, and clears them."""
    named = {
        name.replace("language_model.", "").replace("model.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return named

"""Writes the weights of an export, reads them back, and compares them with the checkpoint.

Shapes: T positions of the sample conversations, V vocabulary.
"""

import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.template import PROBE, ChatTemplate
from stillroom.errors import ModelError, RunError
from stillroom.export.folder import require_space
from stillroom.export.multimodal import MultimodalBase, write_multimodal
from stillroom.export.request import ExportPlan
from stillroom.export.serving import PROBE_TOOL, SENTINEL, ReadBack, WrittenModel, tool_parser
from stillroom.files import write_json
from stillroom.models.gguf.folder import pretrained_path
from stillroom.models.load import attach_adapter, load_tokenizer, read_weights, stop_token_ids
from stillroom.models.multimodal import (
    convert_to_multimodal,
    is_for_multimodal,
    multimodal_config,
    trained_weights_outside_text_part,
    weight_names,
)
from stillroom.models.precision import Precision
from stillroom.models.resolve import ModelLocation
from stillroom.reporting import Reporter, stop_if_cancelled
from stillroom.types import Message, ToolSchema

SHARD_SIZE = "4GB"
PHASES = ("load", "write", "read back")
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CONFIG_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Far above the effect of rounding to bf16, and far below the difference of another model.
_MAX_KL = 0.1
_SAMPLES = (
    "What is the capital of France, and why did it become one?",
    "Write a function that adds two numbers.",
    "A box holds 12 lamps. How many lamps do 7 boxes hold?",
    "Nenne drei Farben und sage, wozu man sie braucht.",
)
_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": PROBE_TOOL, "arguments": json.dumps({"item": SENTINEL})},
        }
    ],
}


def write_merged(
    plan: ExportPlan,
    target: Path,
    *,
    precision: Precision,
    reporter: Reporter,
    multimodal: MultimodalBase | None = None,
    shard_size: str = SHARD_SIZE,
) -> WrittenModel:
    """Writes all weights, configuration, tokenizer and chat template to the folder `target`.

    An adapter is merged into its base in the base's number format, so each weight is rounded once.
    With `multimodal`, the model is written as the text part of that model. Raises RunError if the
    written model predicts other tokens than the checkpoint.
    """
    name = plan.checkpoint.name
    tokenizer = load_tokenizer(plan.checkpoint)
    samples = _sample_ids(tokenizer)
    _report_phase(reporter, 0)
    model = _load_model(plan, precision)
    before_TV = _logprobs(model, samples)
    _report_phase(reporter, 1)
    model = _merge(model, precision, is_adapter=plan.base is not None)
    require_space(target, sum(p.nbytes for p in model.parameters()))
    if multimodal is None:
        written = _save(model, tokenizer, target, shard_size, name=name)
    else:
        other_parts = write_multimodal(
            multimodal, model, tokenizer, target, is_converted=precision != "auto"
        )
        note = other_parts.sentence(multimodal.name)
        written = replace(_facts_of(model, tokenizer), is_multimodal=True, other_parts=note)
    # Freed before the written model is loaded, so that only one is in memory.
    del model
    gc.collect()
    _report_phase(reporter, 2)
    location = ModelLocation(name, str(target), is_local=True)
    after_TV = _logprobs(read_weights(location, dtype="auto"), samples)
    _report_phase(reporter, 3)
    return replace(written, read_back=_agreement(before_TV, after_TV, name=name))


def _merge(model: Any, precision: Precision, *, is_adapter: bool) -> Any:
    """Returns the model with the adapter, if any, merged, in the requested number format."""
    merged = model.merge_and_unload() if is_adapter else model
    return merged if precision == "auto" else merged.to(_DTYPES[precision])


def _save(model: Any, tokenizer: Any, target: Path, shard_size: str, *, name: str) -> WrittenModel:
    """Writes a model and its tokenizer. Raises RunError if transformers cannot write them."""
    # The base's end-of-text token often differs from the token with which the template ends turns.
    model.generation_config.eos_token_id = sorted(stop_token_ids(model, tokenizer))
    try:
        model.save_pretrained(target, max_shard_size=shard_size)
        tokenizer.save_pretrained(target)
    # ValueError: generation settings that contradict each other.
    except (SafetensorError, ValueError) as error:
        raise RunError(
            f"the weights of {name!r} cannot be written: {error}",
            "check the disk's free space and the model's generation_config.json",
        ) from error
    add_old_setting_names(target)
    return _facts_of(model, tokenizer)


def _facts_of(model: Any, tokenizer: Any) -> WrittenModel:
    return WrittenModel(
        _PRECISIONS.get(model.dtype, str(model.dtype)),
        find_tool_parser(tokenizer),
        max_context=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        parameters=model.num_parameters(),
    )


def _agreement(before_TV: Tensor, after_TV: Tensor, *, name: str) -> ReadBack:
    """Returns how well the written model agrees with the checkpoint.

    Raises RunError if their KL is too large.
    """
    read_back = compare(before_TV, after_TV)
    if not read_back.kl <= _MAX_KL:
        raise RunError(
            f"the reloaded export predicts other tokens than {name!r} (KL {read_back.kl:.2g} nats "
            "per token), so it was deleted",
            "use precision fp32, or format adapter; an adapter that changes tied embeddings cannot "
            "be merged",
        )
    return read_back


def _load_model(plan: ExportPlan, precision: Precision) -> Any:
    """Returns the checkpoint's model in at least the precision of its files."""
    base = plan.base
    if base is None:
        return read_weights(plan.checkpoint, dtype="auto").eval()
    # Checked first, since a quantised model cannot be loaded without the quantiser's library.
    settings, _ = PretrainedConfig.get_config_dict(pretrained_path(base))
    if settings.get("quantization_config"):
        raise ModelError(
            f"the base model {base.name!r} is quantised, so no adapter can be merged into it",
            "use format adapter, or train on the base's unquantised files",
        )
    if other_parts := trained_weights_outside_text_part(plan.checkpoint.path):
        raise ModelError(
            f"the adapter {plan.checkpoint.name!r} also changes other parts of a multimodal model, "
            f"e.g. {other_parts[0]}, but Stillroom merges only text parts",
            "use format adapter, or merge it with peft",
        )
    model = read_weights(base, dtype=torch.float32 if precision == "fp32" else "auto")
    return attach_adapter(model, plan.checkpoint).eval()


def write_adapter(checkpoint: ModelLocation, base: ModelLocation, target: Path) -> WrittenModel:
    """Writes a peft adapter with its tokenizer and chat template to the folder `target`.

    An adapter of a multimodal model's text part is converted to an adapter of the whole model.
    """
    target.mkdir(exist_ok=True)
    weights = sorted(checkpoint.path.glob("adapter_model*.safetensors"))
    if not weights:
        raise ModelError(
            f"{checkpoint.path} has no adapter_model.safetensors", "use a complete checkpoint"
        )
    for path in weights:
        shutil.copyfile(path, target / path.name)
    config = msgspec.json.decode((checkpoint.path / "adapter_config.json").read_bytes())
    write_json(
        target / "adapter_config.json", {**config, "base_model_name_or_path": pretrained_path(base)}
    )
    multimodal = multimodal_config(base)
    if multimodal is not None and not is_for_multimodal(weight_names(target)):
        convert_to_multimodal(target, multimodal.model_type)
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.save_pretrained(target)
    add_old_setting_names(target)
    return WrittenModel(
        _stored_dtype(base), find_tool_parser(tokenizer), is_multimodal=multimodal is not None
    )


def _stored_dtype(base: ModelLocation) -> str:
    """Returns the number format of a base's weights according to its config; `auto` if unknown.

    The serving command needs it: by default, some servers load fp32 weights in half precision.
    """
    try:
        settings, _ = PretrainedConfig.get_config_dict(pretrained_path(base))
    except OSError:
        return "auto"
    text: dict[str, Any] = settings.get("text_config") or {}
    names = (part.get(key) for part in (settings, text) for key in ("dtype", "torch_dtype"))
    return _CONFIG_PRECISIONS.get(str(next((name for name in names if name), None)), "auto")


def _sample_ids(tokenizer: Any) -> list[list[int]]:
    renderer = ChatRenderer(tokenizer)
    return [renderer.prompt_ids([{"role": "user", "content": text}], []) for text in _SAMPLES]


@torch.no_grad()
def _logprobs(model: PreTrainedModel, samples: Sequence[Sequence[int]]) -> Tensor:
    """Returns the log-probabilities [T, V] of the token after each token of the samples."""
    rows = [model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in samples]
    return torch.cat(rows)


def compare(before_TV: Tensor, after_TV: Tensor) -> ReadBack:
    """Returns how well the log-probabilities [T, V] of two models agree."""
    same_T = before_TV.argmax(-1) == after_TV.argmax(-1)
    # where: tokens with probability 0 may be -inf on both sides, which would give nan.
    terms_TV = torch.where(before_TV.isfinite(), before_TV.exp() * (before_TV - after_TV), 0.0)
    return ReadBack(
        positions=len(same_T),
        same_token=same_T.float().mean().item(),
        kl=terms_TV.sum(-1).mean().clamp(min=0).item(),
    )


def find_tool_parser(tokenizer: Any) -> str | None:
    """Returns vLLM's parser for the calls that a tokenizer's chat template writes, if known."""
    template = ChatTemplate(tokenizer, include_thinking=False)
    try:
        return tool_parser(template.text([*PROBE, _CALL], [_TOOL]))
    except ModelError:
        return None  # the template does not support tools


def _report_phase(reporter: Reporter, done: int) -> None:
    stop_if_cancelled(reporter)
    reporter.progress(done, len(PHASES), unit="steps", phase=PHASES[min(done, 2)])


def add_old_setting_names(folder: Path) -> None:
    """Adds the old names of settings to a model folder; transformers 5 reads both names."""
    for name, add_names in (
        ("config.json", model_settings),
        ("tokenizer_config.json", _tokenizer_settings),
    ):
        path = folder / name
        if path.is_file():
            write_json(path, add_names(msgspec.json.decode(path.read_bytes())))


def model_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of config.json with both their old and new names.

    Without `rope_theta` and `rope_scaling`, older programs silently use other positions.
    """
    old: dict[str, Any] = {}
    if "dtype" in settings:
        old["torch_dtype"] = settings["dtype"]
    rope: dict[str, Any] = settings.get("rope_parameters") or {}
    # Models with several kinds of layers have one entry per kind, and never had old names.
    if "rope_theta" in rope:
        old["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            old["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {**old, **settings}


def _tokenizer_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of tokenizer_config.json with a class that transformers 4 knows."""
    if settings.get("tokenizer_class") != "TokenizersBackend":
        return settings
    return {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}

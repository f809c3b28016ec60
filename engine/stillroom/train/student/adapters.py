"""LoRA adapters: choosing their layers, creating them, and loading them for further training."""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from stillroom.errors import ConfigError, missing_extra
from stillroom.models.load import load_adapter
from stillroom.models.placement import base_model
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace
from stillroom.train.config.sections import ModelSection

_Kind = Literal["mixer", "mlp", "expert", "other"]
_MIXERS = ("Attention", "Mixer", "Mamba", "DeltaNet", "ShortConv")
"""Substrings of the class names of modules that mix tokens."""
_OTHERS = ("router", "altup")
"""Substrings of the names of linear layers that are gates or routers, not projections."""
_READ_BY_KERNELS = frozenset({"dt_proj", "out_proj", "x_proj"})
"""Names of a Mamba layer's projections whose weights are used directly, bypassing an adapter."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A linear layer, or the stacked weights of a layer's experts, that LoRA may adapt."""

    name: str
    kind: _Kind
    is_parameter: bool = False
    is_unsupported: bool = False
    """Whether an adapter would have no effect, or peft rejects it."""

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    def is_named(self, name: str) -> bool:
        """Returns whether `name` is one part, or several consecutive ones, of this dotted name."""
        return f".{name}." in f".{self.name}."


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """The layers that a LoRA adapter targets, by full name."""

    modules: list[str]
    parameters: list[str]
    """Stacked weights of experts."""
    unsupported: list[str]
    """The name suffixes of chosen layers that cannot have an adapter."""


def new_adapter(model: Any, section: ModelSection, *, like: str | Path | None = None) -> Any:
    """Returns a peft model with a new LoRA adapter.

    like: the folder of an adapter to resume; its whole configuration is copied and `section` is
    ignored.
    Raises ConfigError for a name in lora_targets that the model does not have.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise missing_extra("train", "training a LoRA adapter") from error
    if like is not None:
        config = LoraConfig.from_pretrained(str(like))
        # peft saves adapters with inference_mode on, which freezes them.
        config.inference_mode = False
        # The base may have moved since, with its workspace.
        config.base_model_name_or_path = None
        return get_peft_model(model, config)
    targets = choose_targets(model, section.lora_targets)
    return get_peft_model(
        model,
        LoraConfig(
            r=section.qlora_rank,
            lora_alpha=section.alpha,
            target_modules=targets.modules,
            target_parameters=targets.parameters or None,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        ),
    )


def load_trained_adapter(
    workspace: Workspace, location: ModelLocation, section: ModelSection, *, keep_on_cpu: bool
) -> Any:
    """Returns the peft model of a LoRA checkpoint on its base, for further training.

    Raises ConfigError if `section` describes a different adapter.
    """
    check_no_new_targets(section)
    model = load_adapter(
        workspace,
        location,
        precision=section.student_precision,
        quantization=section.quantization,
        is_trainable=True,
        keep_on_cpu=keep_on_cpu,
    )
    rank = model.peft_config["default"].r
    if rank != section.qlora_rank:
        raise ConfigError(
            f"model.path {section.path!r} is a LoRA adapter of rank {rank}, but model.qlora_rank "
            f"is {section.qlora_rank}",
            f"set model.qlora_rank: {rank} to train this adapter further, or start from its base",
        )
    return model


def check_no_new_targets(section: ModelSection) -> None:
    """Raises ConfigError if lora_targets is set for an existing adapter."""
    if section.lora_targets is not None:
        raise ConfigError(
            f"model.path {section.path!r} is a LoRA adapter, whose layers cannot be changed",
            "leave model.lora_targets out, or start from the adapter's base",
        )


def choose_targets(model: Any, wanted: str | Sequence[str] | None) -> LoraTargets:
    """Returns the layers for an adapter; `wanted` is model.lora_targets of config.yml."""
    targets = list(_adapter_targets(model))
    match wanted:
        case None | "auto":
            chosen = [target for target in targets if target.kind in {"mixer", "mlp"}]
        case "attention":
            chosen = [target for target in targets if target.kind == "mixer"]
        case "all-linear":
            chosen = [target for target in targets if target.kind != "other"]
        case names:
            names = [names] if isinstance(names, str) else names
            _check_names(names, targets)
            chosen = [t for t in targets if any(t.is_named(name) for name in names)]
    modules = [t.name for t in chosen if not (t.is_parameter or t.is_unsupported)]
    parameters = [target.name for target in chosen if target.is_parameter]
    unsupported = list(dict.fromkeys(target.leaf for target in chosen if target.is_unsupported))
    if not modules and not parameters:
        reason = f": no adapter can be put on {', '.join(unsupported)}" if unsupported else ""
        raise ConfigError(
            f"model.lora_targets matches no layer of a {model.config.model_type} model{reason}",
            "choose other layers, or train all weights: model.qlora_rank: 0",
        )
    return LoraTargets(modules, parameters, unsupported)


def describe_adapter(model: Any, unsupported: Sequence[str] = ()) -> list[str]:
    """Returns notes on the layers of a peft model's adapter, and on those without one.

    unsupported: the names of chosen layers that cannot have an adapter.
    """
    from peft.tuners.lora import LoraLayer

    adapted, has_experts = Counter[str](), False
    for name, module in base_model(model).named_modules():
        parts = [part for part in name.split(".") if part != "base_layer"]
        has_experts = has_experts or "experts" in parts
        if isinstance(module, LoraLayer):
            # Stacked expert weights have their own names in the module that holds them.
            parameter = getattr(module, "parameter_name", None)
            adapted[f"experts.{parameter}" if parameter and "experts" in parts else parts[-1]] += 1
    notes = [f"the adapter is on {adapted.total()} layers: {', '.join(adapted)}"]
    if unsupported:
        notes.append(f"no adapter can be put on {', '.join(unsupported)} of this model")
    if has_experts:
        are_experts_trained = any("experts" in name for name in adapted)
        notes.append(
            "the experts are trained"
            if are_experts_trained
            else "the experts are not trained; model.lora_targets=all-linear would train them"
        )
    return notes


def _check_names(names: Sequence[str], targets: Sequence[_Target]) -> None:
    """Raises ConfigError for a name that no target has."""
    all_parts = sorted({part for t in targets for part in t.name.split(".") if not part.isdigit()})
    for name in names:
        if any(target.is_named(name) for target in targets):
            continue
        close = difflib.get_close_matches(name, all_parts, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        leaves = ", ".join(dict.fromkeys(target.leaf for target in targets))
        raise ConfigError(
            f"model.lora_targets: no layer is named {name!r}{guess}",
            f"choose auto, attention or all-linear, or layers of this model's blocks: {leaves}",
        )


def _adapter_targets(model: Any) -> Iterator[_Target]:
    """Yields the linear layers and expert weights in the blocks of a model's text part."""
    decoder = base_model(model).get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    config = base_model(model).config.get_text_config()
    blocks = next(
        name
        for name, part in decoder.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers
    )
    uses = Counter(id(m.weight) for m in decoder.modules() if isinstance(m, nn.Linear | Conv1D))
    mixers = {
        f"{name}.": module
        for name, module in decoder.named_modules()
        if any(part in type(module).__name__ for part in _MIXERS)
        and not type(module).__name__.endswith("DecoderLayer")
    }
    recurrent = tuple(name for name, m in mixers.items() if hasattr(m, "A_log") and hasattr(m, "D"))
    accepts = cache(partial(_accepts_adapter, model.config))
    for name, module in decoder.named_modules():
        if not name.startswith(f"{blocks}."):
            continue
        full, leaf = f"{prefix}.{name}" if prefix else name, name.rpartition(".")[2]
        if isinstance(module, nn.Linear | Conv1D):
            # A change of a weight shared by several layers could not be merged into it.
            if uses[id(module.weight)] == 1:
                is_bypassed = leaf in _READ_BY_KERNELS and name.startswith(recurrent)
                kind = _kind(name, module, config, tuple(mixers))
                yield _Target(full, kind, is_unsupported=is_bypassed or not accepts(leaf))
        elif leaf == "experts":
            for weight, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield _Target(f"{full}.{weight}", "expert", is_parameter=True)


def _kind(name: str, module: Any, config: Any, mixers: tuple[str, ...]) -> _Kind:
    """Returns what a linear layer is part of; `mixers` are name prefixes of token mixers."""
    parts = name.split(".")
    if any(other in part for part in parts for other in _OTHERS):
        return "other"
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    choices = {1, *(getattr(config, count, None) for count in counts)}
    if parts[-1].endswith("gate") and getattr(module, "out_features", None) in choices:
        return "other"
    if "experts" in parts:
        return "expert"
    return "mixer" if name.startswith(mixers) else "mlp"


def _accepts_adapter(config: Any, leaf: str) -> bool:
    """Returns whether peft can adapt a linear layer of this name in a model of this type.

    For some types it rejects names, or mistakes a dense layer's name for the experts'.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    probe: Any = nn.Module()
    probe.config = config
    probe.add_module(leaf, nn.Linear(1, 1))
    try:
        inject_adapter_in_model(LoraConfig(r=1, target_modules=[leaf]), probe)
    except ValueError:
        return False
    return isinstance(probe.get_submodule(leaf), LoraLayer)
